package dev.blobstore;

import static dev.blobstore.Harness.check;
import static dev.blobstore.Harness.end;
import static dev.blobstore.Harness.fails;
import static dev.blobstore.Harness.print;
import static dev.blobstore.Harness.require;
import static dev.blobstore.Harness.same;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalDouble;
import java.util.Set;
import java.util.function.DoubleSupplier;

/** {@code Checks FOLDER}, with the files that tests/runtime/test_java.py writes. */
final class Checks {
  private static final float[] POINTS = {0, 0, 0, 1, 1, 0, 1, 1};

  private final String folder;

  private Checks(String folder) {
    this.folder = folder + "/";
  }

  public static void main(String[] arguments) {
    Checks all = new Checks(arguments[0]);
    check("errors", all::errors);
    check("dtypes", all::dtypes);
    check("tensors", all::tensors);
    check("bad tensors", all::badTensors);
    check("deep tensors", all::deepTensors);
    check("texts", all::texts);
    check("cache", all::cache);
    check("bases", all::bases);
    check("shared", all::shared);
    check("run", all::run);
    check("values", all::values);
    check("orders", all::orders);
    check("results in given tensors", all::into);
    check("bad inputs", all::badInputs);
    check("updates", all::updates);
    check("bad updates", all::badUpdates);
    check("more tensors than references", all::many);
    check("adapters", all::adapters);
    check("merge", all::merge);
    check("packed", all::packed);
    check("training", all::training);
    check("training without gradients", all::mezo);
    check("releases", all::releases);
    check("names for logs", all::names);
    check("closed", all::closed);
    check("collected", all::collected);
    check("nothing is left", all::nothingIsLeft);
    end();
  }

  private static Tensor points() {
    return Tensor.of(POINTS, 4, 2);
  }

  private BlobCache xor() {
    return BlobCache.open(folder + "programs/xor.ptd");
  }

  /** It holds the cache. */
  private Method method(String program, BlobCache cache) {
    try (Program loaded = Program.load(folder + "programs/" + program + ".pte", cache)) {
      return loaded.loadMethod("forward");
    }
  }

  private Method serve(BlobCache cache) {
    return method("serve", cache);
  }

  private void errors() {
    for (BlobStoreException.Maker kind : BlobStoreException.MAKERS) {
      BlobStoreException error = kind.make("/a/file", "a reason", 5);
      same(error.getMessage(), "/a/file: a reason");
      same(error.path(), "/a/file");
      same(error.reason(), "a reason");
      same(error.number(), 5);
      print("kind", error.getClass().getSimpleName(), error.getClass().getSuperclass().getSimpleName());
    }
    same(BlobStoreException.of(0, "", "a reason", 0).getMessage(), "a reason");
    // from the library, with the path, the reason and errno
    BlobStoreException.FileAccess error =
        fails(BlobStoreException.FileAccess.class, () -> BlobCache.open("/nowhere/w.ptd"), "/nowhere/w.ptd: ");
    same(error.number(), 2);
    same(error.path(), "/nowhere/w.ptd");
    fails(BlobStoreException.InvalidFile.class, () -> BlobCache.open(folder + "text.txt"), "text.txt");
  }

  private void dtypes() {
    for (DType dtype : DType.values()) {
      print("dtype", dtype.ordinal(), dtype, dtype.size());
    }
  }

  private void tensors() {
    ByteBuffer memory = ByteBuffer.allocateDirect(32).order(ByteOrder.nativeOrder());
    memory.position(8);
    Tensor tensor = Tensor.of(memory, DType.FLOAT32, 2, 3);
    memory.putFloat(8, 7); // the same memory
    same(tensor.floats()[0], 7f);
    tensor.data().putFloat(4, 9);
    same(memory.getFloat(12), 9f);
    same(tensor.data().position(), 0);
    same(Arrays.toString(tensor.sizes()), "[2, 3]");
    same(Arrays.toString(tensor.dimOrder()), "[0, 1]");
    same(tensor.toString(), "float32[2, 3]");
    same(tensor.elements(), 6);
    same(Tensor.of(new float[] {1.5f}).sizes().length, 0);
    same(Tensor.of(new long[] {1, -2}, 2).longs()[1], -2L);
    same(Tensor.of(new int[] {1, -2}, 2).ints()[1], -2);
    same(Tensor.of(new double[] {1, -2}, 2).doubles()[1], -2.0);
    same(Tensor.of(new byte[] {1, -2}, 2).bytes()[1], (byte) -2);
    same(Tensor.of(new boolean[] {false, true}, 2).bytes()[1], (byte) 1);
    same(Tensor.zeros(DType.FLOAT32, 0, 1L << 30, 4).elements(), 0);
    ByteBuffer big = ByteBuffer.allocateDirect(3); // big-endian, which is nothing for bytes
    same(Tensor.of(big, DType.UINT8, 3).elements(), 3);
    same(Arrays.toString(Tensor.of(memory, DType.FLOAT32, new long[] {2, 3}, new int[] {1, 0}).dimOrder()), "[1, 0]");
  }

  private void badTensors() {
    ByteBuffer good = ByteBuffer.allocateDirect(24).order(ByteOrder.nativeOrder());
    Class<BlobStoreException.UnsupportedData> refused = BlobStoreException.UnsupportedData.class;
    Class<BlobStoreException.Layout> layout = BlobStoreException.Layout.class;
    fails(refused, () -> Tensor.of(ByteBuffer.allocate(24), DType.FLOAT32, 6), "not direct");
    ByteOrder other = ByteOrder.nativeOrder() == ByteOrder.BIG_ENDIAN ? ByteOrder.LITTLE_ENDIAN : ByteOrder.BIG_ENDIAN;
    fails(refused, () -> Tensor.of(good.duplicate().order(other), DType.FLOAT32, 6), "nativeOrder()");
    fails(refused, () -> Tensor.of(good, DType.FLOAT32, new long[17]), "17");
    fails(refused, () -> Tensor.of(good, DType.FLOAT32, 6).longs(), "longs() is for INT64; this is float32[6]");
    fails(refused, () -> Tensor.zeros(DType.INT64, 1L << 30), "8589934592 bytes");
    fails(layout, () -> Tensor.of(good, DType.FLOAT32, 5), "float32[5] has 20 bytes, the buffer has 24");
    fails(layout, () -> Tensor.of(good, DType.FLOAT32, -6), "-6");
    fails(layout, () -> Tensor.of(good, DType.FLOAT32, 1L << 31), "2147483648");
    fails(layout, () -> Tensor.zeros(DType.INT64, 1L << 30, 1L << 30, 1L << 30), "too large");
    fails(layout, () -> Tensor.zeros(DType.INT64, 0, 1L << 30, 1L << 30, 1L << 30), "too large");
    fails(layout, () -> Tensor.of(new float[5], 2, 3), "float32[2, 3] has 6 elements, the array has 5");
    fails(layout, () -> Tensor.of(good, DType.FLOAT32, new long[] {2, 3}, new int[] {0, 0}), "[0, 0]");
    fails(layout, () -> Tensor.of(good, DType.FLOAT32, new long[] {2, 3}, new int[] {0}), "[0]");
    fails(layout, () -> Tensor.of(good, DType.FLOAT32, new long[] {2, 3}, new int[] {0, 300}), "300");
    fails(NullPointerException.class, () -> Tensor.of((ByteBuffer) null, DType.FLOAT32, 6));
  }

  /** Files may have more dimensions than ExecuTorch runs, and no Tensor does. */
  private void deepTensors() {
    Class<BlobStoreException.UnsupportedData> refused = BlobStoreException.UnsupportedData.class;
    try (BlobCache cache = BlobCache.open(folder + "deep.ptd");
        LogicalTensors tensors = LogicalTensors.of(cache)) {
      require(cache.blob("16").sizes().length == 16 && cache.blob("16").floats()[0] == 16, "as many as there may be");
      for (int rank : List.of(17, 64)) {
        String key = String.valueOf(rank);
        fails(refused, () -> cache.blob(key), "at most 16 dimensions, not " + rank);
        int[] sizes = new int[rank];
        Arrays.fill(sizes, 1);
        Tensor deep = Tensor.allocate(DType.FLOAT32.ordinal(), sizes, null); // the constructors for callers refuse it
        fails(refused, () -> cache.update(Map.of(key, deep)), "not " + rank);
        fails(refused, () -> tensors.update(Map.of(key, deep)), "not " + rank);
        fails(BlobStoreException.Layout.class, () -> cache.update(Map.of(key, Tensor.of(new float[1]))), key);
      }
      same(cache.generation(), 0L);
    }
  }

  private void texts() {
    String name = "w\u00e4\u4e16\ud834\udd1e.ptd"; // two, three and four bytes in UTF-8, in every locale
    try (BlobCache cache = BlobCache.open(folder + name)) {
      require(cache.name().endsWith(name), cache.name());
      fails(BlobStoreException.KeyNotFound.class, () -> cache.blob("\u00e9\ud83d\ude00\u0000."), "\u00e9\ud83d\ude00\u0000.");
      require(!cache.contains("\u00e9"), "no such key");
      fails(BlobStoreException.UnsupportedData.class, () -> cache.contains("a\ud834"), "surrogate");
      fails(BlobStoreException.UnsupportedData.class, () -> cache.contains("\udd1eb"), "surrogate");
      fails(NullPointerException.class, () -> cache.contains(null));
    }
    fails(BlobStoreException.FileAccess.class, () -> BlobCache.open(folder + "plain.ptd\u0000.txt"), "NUL");
    fails(NullPointerException.class, () -> BlobCache.open((String) null));
    fails(BlobStoreException.FileAccess.class, () -> BlobCache.open("/nowhere/\ufffd\uffff"), "\ufffd\uffff");
  }

  private void cache() {
    String saved = folder + "saved.ptd";
    try (BlobCache cache = BlobCache.open(folder + "plain.ptd")) {
      same(cache.keys(), List.of("a", "b", "tied", "opaque"));
      same(cache.generation(), 0L);
      same(cache.version("b"), 0L);
      require(cache.contains("a") && cache.owns("a") && !cache.contains("c") && !cache.owns("c"), "keys");
      same(cache.blob("b").toString(), "float32[60000]");
      same(cache.blob("b").floats()[59_999], 1f);
      byte[] opaque = cache.blob("opaque").bytes();
      require(opaque.length == 100 && opaque[99] == 99, "opaque bytes");
      require(cache.verify(), "files with digests");
      cache.checkFiles();

      float[] values = new float[60_000];
      Arrays.fill(values, 3);
      long generation = cache.update(Map.of("b", Tensor.of(values, 60_000), "opaque", Tensor.zeros(DType.INT16, 50)));
      same(cache.generation(), generation);
      same(cache.version("b"), generation);
      same(cache.version("a"), 0L);
      same(cache.blob("b").floats()[7], 3f);
      same(cache.blob("opaque").bytes()[99], (byte) 0);
      same(Set.copyOf(cache.dirty()), Set.of("b", "opaque"));
      BlobCache.Stats stats = cache.stats();
      same(stats.keys, 4L);
      same(stats.dirtyKeys, 2L);
      same(stats.dirtyBytes, 240_100L);
      same(stats.commits, 1L);
      require(stats.mappedBytes >= 480_100 && stats.privateBytes.orElse(240_100) >= 240_100, "memory");

      fails(BlobStoreException.KeyNotFound.class, () -> cache.update(Map.of("c", Tensor.zeros(DType.FLOAT32, 1))), "'c'");
      fails(BlobStoreException.Layout.class, () -> cache.update(Map.of("b", Tensor.zeros(DType.FLOAT32, 300, 200))));
      fails(BlobStoreException.Layout.class, () -> cache.update(Map.of("b", Tensor.zeros(DType.INT32, 60_000))));
      fails(BlobStoreException.Layout.class, () -> cache.update(Map.of("opaque", Tensor.zeros(DType.UINT8, 99))));
      fails(NullPointerException.class, () -> cache.update(Collections.singletonMap("b", null)));
      fails(NullPointerException.class, () -> cache.update(Collections.singletonMap(null, Tensor.zeros(DType.INT8, 1))));
      fails(BlobStoreException.OutputPath.class, () -> cache.save(folder + "plain.ptd", false));
      fails(BlobStoreException.FileAccess.class, () -> cache.save(folder + "no/such/folder.ptd", false));
      same(cache.generation(), generation);

      long size = cache.save(saved, true);
      same(size, Path.of(saved).toFile().length());
      same(cache.revert(List.of("opaque")), cache.generation());
      same(cache.blob("opaque").bytes()[99], (byte) 99);
      cache.revert();
      same(cache.blob("b").floats()[7], 1f);
      same(cache.dirty(), List.of());
      cache.load(saved);
      same(cache.blob("b").floats()[7], 3f);
    }
    try (BlobCache copy = BlobCache.open(List.of(folder + "plain.ptd"), BlobCache.Mode.COPY)) {
      same(copy.blob("b").floats()[7], 1f);
    }
    try (BlobCache empty = BlobCache.open()) {
      same(empty.keys(), List.of());
    }
  }

  private void bases() {
    BlobCache foundation = BlobCache.open(folder + "adapters/foundation.ptd");
    BlobCache adapter =
        BlobCache.open(List.of(folder + "adapters/adapter.ptd"), BlobCache.Mode.PRIVATE, foundation, null);
    foundation.close(); // the other one holds it
    require(adapter.contains("m.weight") && !adapter.owns("m.weight"), "a key of the base");
    same(adapter.blob("m.weight").floats()[34], 34f);
    adapter.close();
    fails(
        BlobStoreException.Closed.class,
        () -> BlobCache.open(List.of(folder + "plain.ptd"), BlobCache.Mode.PRIVATE, adapter, null),
        "BlobCache");
  }

  private void shared() {
    String copy = folder + "copy.ptd";
    BlobCache.makeWorkingCopy(List.of(folder + "plain.ptd"), copy);
    try (BlobCache one = BlobCache.open(List.of(copy), BlobCache.Mode.SHARED);
        BlobCache other = BlobCache.open(List.of(copy), BlobCache.Mode.SHARED)) {
      one.update(Map.of("a", Tensor.of(filled(60_000, 5), 60_000)));
      same(other.blob("a").floats()[1], 5f);
      fails(BlobStoreException.Unsupported.class, one::revert);
    }
  }

  private static float[] filled(int size, float value) {
    float[] made = new float[size];
    Arrays.fill(made, value);
    return made;
  }

  private void run() {
    try (BlobCache cache = xor();
        Program program = Program.load(folder + "programs/serve.pte", cache);
        Method forward = program.loadMethod("forward")) {
      same(program.methods(), List.of("forward"));
      same(forward.name(), "forward");
      print("needs", program.needs("forward").size());
      same(program.backends("forward"), List.of("BlobStoreBackend"));
      same(program.inputs("forward").toString(), "[x: float32[4, 2]]");
      same(forward.inputs().toString(), "[x: float32[4, 2]]");
      same(program.outputs("forward").get(0).kind(), ValueInfo.Kind.TENSOR);
      same(Arrays.toString(forward.outputs().get(0).sizes()), "[4, 2]");
      same(forward.outputs().get(0).dtype(), DType.FLOAT32);
      same(program.packedCachePath(), "");
      Outputs outputs = forward.execute(points());
      same(outputs.size(), 1);
      same(outputs.tensor(0).toString(), "float32[4, 2]");
      print("scores", outputs.tensor(0).floats());
      Outputs later = forward.execute(Tensor.zeros(DType.FLOAT32, 4, 2));
      require(!Arrays.equals(later.tensor(0).floats(), outputs.tensor(0).floats()), "results have memory of their own");
      print("scores again", outputs.tensor(0).floats());
      fails(BlobStoreException.MethodNotFound.class, () -> program.loadMethod("backward"), "'backward'");
      fails(BlobStoreException.MethodNotFound.class, () -> program.inputs("backward"));
    }
    try (BlobCache empty = BlobCache.open()) {
      fails(BlobStoreException.KeyNotFound.class, () -> serve(empty).close());
      fails(BlobStoreException.InvalidFile.class, () -> Program.load(folder + "text.txt", empty), "text.txt");
      fails(NullPointerException.class, () -> Program.load(folder + "programs/serve.pte", null));
    }
  }

  private void values() {
    try (Method forward = method("text", BlobCache.open())) {
      Outputs outputs = forward.execute();
      same(outputs.text(0), "a text");
      same(outputs.integer(1), 7L);
      same(outputs.real(2), 0.5);
      fails(BlobStoreException.UnsupportedData.class, () -> outputs.tensor(1), "output 1 is Long, not Tensor");
      fails(ArrayIndexOutOfBoundsException.class, () -> outputs.get(3));
    }
    try (Method forward = method("numbers", BlobCache.open())) {
      Tensor x = Tensor.of(new float[] {1, 2}, 2);
      Outputs outputs = forward.execute(x, 3, 0.5f, true);
      print("numbers", outputs.tensor(0).floats());
      forward.execute(x, 3L, 0.5, true);
      fails(BlobStoreException.Input.class, () -> forward.execute(x, 3, 0.5, null), "input 3");
      fails(BlobStoreException.Input.class, () -> forward.execute(x, 0.5, 0.5, true), "input 1");
      fails(BlobStoreException.Input.class, () -> forward.execute(x, 4, 0.5, true), "input 1");
    }
  }

  private void orders() {
    try (Method forward = method("channels_last", BlobCache.open())) {
      same(Arrays.toString(forward.inputs().get(0).dimOrder()), "[0, 2, 3, 1]");
      ByteBuffer memory = ByteBuffer.allocateDirect(32).order(ByteOrder.nativeOrder());
      memory.asFloatBuffer().put(new float[] {-1, 2, -3, 4, -5, 6, -7, 8});
      Tensor out =
          forward.execute(Tensor.of(memory, DType.FLOAT32, new long[] {1, 2, 2, 2}, new int[] {0, 2, 3, 1})).tensor(0);
      same(Arrays.toString(out.dimOrder()), "[0, 2, 3, 1]");
      same(Arrays.toString(out.floats()), "[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]");
      fails(
          BlobStoreException.Input.class, () -> forward.execute(Tensor.of(memory, DType.FLOAT32, 1, 2, 2, 2)), "order");
    }
  }

  private void into() {
    try (BlobCache cache = xor();
        Method forward = serve(cache)) {
      float[] expected = forward.execute(points()).tensor(0).floats();
      Tensor mine = Tensor.zeros(DType.FLOAT32, 4, 2);
      same(forward.executeInto(new Tensor[] {mine}, points()).tensor(0), mine);
      require(Arrays.equals(mine.floats(), expected), "the result");
      require(forward.executeInto(new Tensor[] {null}, points()).tensor(0) != mine, "a new one");
      require(forward.executeInto(new Tensor[0], points()).tensor(0) != mine, "a new one");
      Class<BlobStoreException.Layout> layout = BlobStoreException.Layout.class;
      fails(
          layout,
          () -> forward.executeInto(new Tensor[] {Tensor.zeros(DType.FLOAT32, 2, 4)}, points()),
          "output 0 is float[4, 2], and the tensor for it is float[2, 4]");
      fails(layout, () -> forward.executeInto(new Tensor[] {Tensor.zeros(DType.INT32, 4, 2)}, points()), "int[4, 2]");
      Tensor turned = Tensor.of(mine.data(), DType.FLOAT32, new long[] {4, 2}, new int[] {1, 0});
      fails(layout, () -> forward.executeInto(new Tensor[] {turned}, points()), "order");
      fails(
          BlobStoreException.UnsupportedData.class,
          () -> forward.executeInto(new Tensor[] {readOnly(mine)}, points()),
          "read-only");
      require(Arrays.equals(mine.floats(), expected), "not written to");
    }
    try (Method forward = method("text", BlobCache.open())) {
      Tensor one = Tensor.zeros(DType.INT64);
      fails(BlobStoreException.Layout.class, () -> forward.executeInto(new Tensor[] {one}), "output 0 is no tensor");
    }
  }

  private static Tensor readOnly(Tensor tensor) {
    return Tensor.of(tensor.data().asReadOnlyBuffer().order(ByteOrder.nativeOrder()), tensor.dtype(), tensor.sizes());
  }

  private void badInputs() {
    try (BlobCache cache = xor();
        Method forward = serve(cache)) {
      Class<BlobStoreException.Input> input = BlobStoreException.Input.class;
      fails(input, forward::execute, "takes 1 input, 0 were given");
      fails(input, () -> forward.execute(points(), points()), "2 were given");
      fails(input, () -> forward.execute(3), "a tensor");
      fails(input, () -> forward.execute((Object) null), "None");
      fails(input, () -> forward.execute(Tensor.zeros(DType.FLOAT64, 4, 2)), "double");
      fails(input, () -> forward.execute(Tensor.zeros(DType.FLOAT32, 4, 3)), "[4, 3]");
      fails(input, () -> forward.execute(Tensor.zeros(DType.FLOAT32, 4)), "[4]");
      fails(input, () -> forward.execute(Tensor.zeros(DType.FLOAT32, 0, Integer.MAX_VALUE)));
      fails(BlobStoreException.UnsupportedData.class, () -> forward.execute("a text"), "input 0");
      fails(BlobStoreException.UnsupportedData.class, () -> forward.execute((Object) new float[8]), "input 0");
      fails(NullPointerException.class, () -> forward.execute((Object[]) null));
      ByteBuffer odd = ByteBuffer.allocateDirect(40).position(1).slice().order(ByteOrder.nativeOrder());
      Tensor misplaced = Tensor.of(odd.limit(32), DType.FLOAT32, 4, 2);
      fails(BlobStoreException.UnsupportedData.class, () -> forward.execute(misplaced), "multiple of 4");
      Object[] many = new Object[1000];
      Arrays.fill(many, points());
      fails(input, () -> forward.execute(many), "1000 were given");
    }
    try (Method forward = method("planned", BlobCache.open())) { // adds 1 to its input
      Tensor x = Tensor.of(new float[] {0, 1, 2, 3}, 4);
      same(Arrays.toString(forward.execute(x).tensor(1).floats()), "[2.0, 4.0, 6.0, 8.0]");
      same(Arrays.toString(x.floats()), "[0.0, 1.0, 2.0, 3.0]");
      same(forward.execute(readOnly(x)).tensor(1).floats()[0], 2f);
    }
  }

  private void updates() {
    try (BlobCache cache = xor();
        Method forward = serve(cache);
        LogicalTensors tensors = LogicalTensors.of(cache)) {
      require(tensors.names().containsAll(List.of("hidden.weight", "out.bias")), tensors.names().toString());
      require(tensors.contains("hidden.bias") && !tensors.contains("hidden"), "names");
      LogicalTensor weight = tensors.at("hidden.weight");
      same(weight.dtype, DType.FLOAT32);
      same(Arrays.toString(weight.sizes()), "[10, 2]");
      same(weight.refusal, "");
      require(weight.keys.size() == 1 && cache.contains(weight.keys.get(0)), "its blob");
      print("hidden.bias", tensors.value("hidden.bias").floats());
      float[] before = forward.execute(points()).tensor(0).floats();
      long generation = tensors.update(Map.of("hidden.weight", Tensor.zeros(DType.FLOAT32, 10, 2)));
      same(generation, cache.generation());
      print("zeroed", forward.execute(points()).tensor(0).floats());
      cache.revert();
      require(Arrays.equals(before, forward.execute(points()).tensor(0).floats()), "reverted");

      tensors.updateStateDict(folder + "fine_tune.safetensors", true, true);
      print("fine-tuned", forward.execute(points()).tensor(0).floats());
      cache.revert();
      tensors.updateStateDict(
          Map.of(
              "hidden.weight", Tensor.zeros(DType.FLOAT32, 10, 2),
              "other.weight", Tensor.zeros(DType.FLOAT32, 1)),
          false,
          false);
      print("partly", forward.execute(points()).tensor(0).floats());
    }
  }

  private void badUpdates() {
    try (BlobCache cache = xor();
        Method forward = serve(cache);
        LogicalTensors tensors = LogicalTensors.of(cache)) {
      Tensor zeros = Tensor.zeros(DType.FLOAT32, 10, 2);
      fails(BlobStoreException.KeyNotFound.class, () -> tensors.at("hiden.weight"), "hidden.weight");
      fails(BlobStoreException.KeyNotFound.class, () -> tensors.value("hiden.weight"));
      fails(BlobStoreException.KeyNotFound.class, () -> tensors.update(Map.of("hiden.weight", zeros)));
      fails(
          BlobStoreException.Layout.class, () -> tensors.update(Map.of("hidden.weight", Tensor.zeros(DType.FLOAT32, 1))));
      Tensor wrong = Tensor.of(filled(20, Float.NaN), 10, 2);
      fails(BlobStoreException.Update.class, () -> tensors.update(Map.of("hidden.weight", wrong), true), "finite");
      fails(BlobStoreException.Update.class, () -> tensors.updateStateDict(Map.of("hidden.weight", zeros), true, false));
      fails(BlobStoreException.Update.class, () -> tensors.updateStateDict(Map.of("other", zeros), false, false));
      fails(
          BlobStoreException.FileAccess.class, () -> tensors.updateStateDict(folder + "no.safetensors", true, false));
      same(cache.generation(), 0L);
      print("scores after errors", forward.execute(points()).tensor(0).floats());
    }
  }

  /** A call of JNI has room for 65,520 references. */
  private void many() {
    Map<String, Tensor> missing = new HashMap<>();
    Tensor zero = Tensor.zeros(DType.FLOAT32, 1);
    for (int i = 0; i < 70_000; ++i) {
      missing.put("missing" + i, zero);
    }
    try (BlobCache cache = xor();
        LogicalTensors tensors = LogicalTensors.of(cache);
        Method forward = serve(cache)) {
      fails(BlobStoreException.KeyNotFound.class, () -> cache.update(missing), "missing");
      fails(BlobStoreException.KeyNotFound.class, () -> tensors.update(missing), "missing");
      fails(BlobStoreException.Update.class, () -> tensors.updateStateDict(missing, false, false));
      Object[] inputs = missing.values().toArray();
      fails(BlobStoreException.Input.class, () -> forward.execute(inputs), "70000 were given");
    }
  }

  private void adapters() throws IOException {
    String at = folder + "adapters/";
    try (BlobCache foundation = BlobCache.open(at + "foundation.ptd");
        BlobCache cache = BlobCache.open(List.of(at + "adapter.ptd"), BlobCache.Mode.PRIVATE, foundation, null);
        LogicalTensors tensors = LogicalTensors.of(cache)) {
      AdapterInfo info = Adapters.read(at + "2.ptd");
      same(info.path, at + "2.ptd");
      same(info.scale, OptionalDouble.of(1));
      same(info.foundation.get(), Adapters.fingerprint(List.of(at + "foundation.ptd")));
      same(info.modules, List.of("m"));
      same(info.problems, List.of());
      print("fingerprint", info.foundation.get());

      float[] twos = new float[14];
      Arrays.fill(twos, 2);
      Map<String, Tensor> pair =
          Map.of("m.lora_a", Tensor.of(Arrays.copyOf(twos, 10), 2, 5), "m.lora_b", Tensor.of(twos, 7, 2));
      List<String> foundations = List.of(at + "foundation.ptd");
      byte[] expected = Files.readAllBytes(Path.of(at + "2.ptd")); // as Python wrote it
      same(Adapters.save(at + "saved.ptd", pair, foundations, 1), (long) expected.length);
      fails(BlobStoreException.Adapter.class, () -> Adapters.save(at + "n.ptd", pair, foundations, Double.NaN));
      fails(BlobStoreException.Adapter.class, () -> Adapters.save(at + "saved.ptd", Map.of(), foundations, 1));
      require(Arrays.equals(Files.readAllBytes(Path.of(at + "saved.ptd")), expected), "the file differs");

      OptionalDouble one = OptionalDouble.of(1);
      fails(BlobStoreException.Adapter.class, () -> Adapters.setStrength(tensors, 0.5));
      Adapters.load(tensors, at + "2.ptd", one, 1);
      same(cache.blob("m.lora_b").floats()[13], 2f);
      same(Adapters.setStrength(tensors, 0.25), cache.generation());
      same(cache.blob("m.lora_b").floats()[13], 0.5f);
      same(cache.blob("m.lora_a").floats()[9], 2f);
      Adapters.load(tensors, at + "1.ptd", one, 0.5);
      same(cache.blob("m.lora_b").floats()[13], 0.5f);
      fails(BlobStoreException.Adapter.class, () -> Adapters.setStrength(tensors, Double.NaN));
      fails(BlobStoreException.FileAccess.class, () -> Adapters.load(tensors, at + "3.ptd"));
      fails(BlobStoreException.Adapter.class, () -> Adapters.load(tensors, at + "adapter.ptd"), "foundation");
      fails(BlobStoreException.Adapter.class, () -> Adapters.read(at + "foundation.ptd"));
      fails(BlobStoreException.Adapter.class, () -> Adapters.fingerprint(List.of()));

      AdapterInfo peft = Adapters.read(at + "peft"); // a folder of PEFT
      same(peft.scale, OptionalDouble.of(0.5));
      same(peft.foundation, Optional.empty());
      Adapters.load(tensors, at + "peft", OptionalDouble.of(0.25), 1);
      same(cache.blob("m.lora_b").floats()[12], 8f);
      same(cache.blob("m.lora_b").floats()[13], 0f);
      same(cache.blob("m.lora_a").floats()[4], 3f);
      Adapters.loadAll(tensors, List.of(at + "peft", at + "peft"), new double[] {1, -1}, OptionalDouble.of(0.5));
      same(cache.blob("m.lora_b").floats()[13], -4f);

      Adapters.loadAll(tensors, List.of(at + "1.ptd"), new double[] {1}, one); // both have the whole rank
      same(cache.blob("m.lora_b").floats()[13], 1f);
      Adapters.setStrengths(tensors, 0.5);
      same(cache.blob("m.lora_b").floats()[13], 0.5f);
      fails(
          BlobStoreException.Adapter.class,
          () -> Adapters.loadAll(tensors, List.of(at + "1.ptd", at + "2.ptd"), new double[] {1, 1}, one));
      fails(
          BlobStoreException.Adapter.class,
          () -> Adapters.loadAll(tensors, List.of(at + "1.ptd"), new double[] {1, 1}, one),
          "1 adapters and 2 strengths");
      fails(BlobStoreException.Adapter.class, () -> Adapters.setStrengths(tensors, 1, 1));
      same(cache.blob("m.lora_b").floats()[13], 0.5f);
      Adapters.loadAll(tensors, List.of(), new double[] {}, one);
      same(cache.blob("m.lora_b").floats()[13], 0f);
    }
  }

  private void merge() {
    String at = folder + "adapters/";
    try (BlobCache cache = BlobCache.open(at + "foundation.ptd");
        LogicalTensors tensors = LogicalTensors.of(cache)) {
      float[] before = cache.blob("m.weight").floats();
      try (MergedAdapter merged = Adapters.merge(tensors, at + "2.ptd", 0.5)) {
        same(merged.weights(), List.of("m.weight"));
        same(merged.generation(), cache.generation());
        print("merged", cache.blob("m.weight").floats());
        require(!merged.undone(), "merged");
        merged.undo();
        require(merged.undone() && Arrays.equals(cache.blob("m.weight").floats(), before), "undone");
        fails(BlobStoreException.Adapter.class, merged::undo);
      }
    }
  }

  private void packed() {
    String store = folder + "packed";
    float[] heap;
    Tensor ones = Tensor.of(filled(300, 1), 1, 300);
    try (BlobCache cache = BlobCache.open(folder + "programs/packed.ptd");
        Program program = Program.load(folder + "programs/packed.pte", cache);
        Method forward = program.loadMethod("forward")) {
      heap = forward.execute(ones).tensor(0).floats();
      print("packed", heap);
    }
    for (int round = 0; round < 2; ++round) {
      try (PackedStore packed = PackedStore.open(store);
          BlobCache cache =
              BlobCache.open(List.of(folder + "programs/packed.ptd"), BlobCache.Mode.PRIVATE, null, packed);
          Program program = Program.load(folder + "programs/packed.pte", cache);
          Method forward = program.loadMethod("forward")) {
        require(Arrays.equals(forward.execute(ones).tensor(0).floats(), heap), "the same from the store");
        PackedStats stats = packed.stats();
        same(stats.builds, round == 0 ? 1L : 0L);
        same(stats.fallbacks, 0L);
        require(stats.hits > 0 && stats.mappedBytes > 0 && stats.reasons.isEmpty(), "hits");
        PackedFile file = packed.list().get(0);
        same(file.size, Path.of(file.path).toFile().length());
        require(file.entries > 0 && file.inUse && file.problem.isEmpty(), "the file");
        same(packed.verify().size(), 1);
        same(packed.gc(), List.of());
      }
    }
    fails(BlobStoreException.FileAccess.class, () -> PackedStore.open(folder + "plain.ptd"));
    fails(IllegalArgumentException.class, () -> PackedStore.open(store, -1, false));
    fails(IllegalArgumentException.class, () -> PackedStore.open(store, 1, false, -1));
  }

  private void training() {
    try (BlobCache cache = xor();
        Method forward = serve(cache);
        LogicalTensors tensors = LogicalTensors.of(cache);
        Program program = Program.load(folder + "programs/train.pte", cache);
        TrainingProgram training = TrainingProgram.load(program, "forward");
        SGD sgd = SGD.of(0.5, 0.9)) {
      Tensor labels = Tensor.of(new long[] {0, 1, 1, 0}, 4);
      float[] losses = new float[20];
      for (int i = 0; i < losses.length; ++i) {
        losses[i] = training.step(sgd, points(), labels).tensor(0).floats()[0];
      }
      print("losses", losses);
      require(training.names().contains("hidden.weight"), training.names().toString());
      print("trained", training.parameter("hidden.weight").floats());
      fails(BlobStoreException.KeyNotFound.class, () -> training.parameter("hidden"), "'hidden'");
      Tensor kept = training.parameter("hidden.weight");
      training.setParameter("hidden.weight", Tensor.zeros(DType.FLOAT32, kept.sizes()));
      same(training.parameter("hidden.weight").floats()[3], 0f);
      training.setParameter("hidden.weight", kept);
      fails(BlobStoreException.KeyNotFound.class, () -> training.setParameter("hidden", kept), "'hidden'");
      fails(
          BlobStoreException.Layout.class,
          () -> training.setParameter("hidden.weight", Tensor.zeros(DType.FLOAT32, 1)),
          "'hidden.weight' is float[10, 2], not float[1]");
      fails(NullPointerException.class, () -> training.setParameter("hidden.weight", null), "value");
      fails(NullPointerException.class, () -> training.publish(null, true, true), "target");
      fails(NullPointerException.class, () -> training.step(null, points(), labels));
      same(training.publish(tensors, true, true), cache.generation());
      print("published", forward.execute(points()).tensor(0).floats());
      Tensor endless = Tensor.of(filled(8, Float.POSITIVE_INFINITY), 4, 2);
      fails(BlobStoreException.NotFiniteLoss.class, () -> training.step(sgd, endless, labels));
      training.step(sgd, TrainingProgram.OnNan.SKIP, endless, labels);
      print("trained still", training.parameter("hidden.weight").floats());
    }
    checkpoints();
    fails(BlobStoreException.Training.class, () -> SGD.of(-1, 0));
    try (BlobCache cache = xor();
        Program program = Program.load(folder + "programs/serve.pte", cache)) {
      fails(BlobStoreException.Program.class, () -> TrainingProgram.load(program, "forward").close());
    }
  }

  /** A run that goes on from a checkpoint ends as the one that was not broken. */
  private void checkpoints() {
    String file = folder + "java.checkpoint";
    try (BlobCache cache = xor();
        Program program = Program.load(folder + "programs/train.pte", cache);
        TrainingProgram training = TrainingProgram.load(program, "forward");
        TrainingProgram again = TrainingProgram.load(program, "forward");
        AdamW adam = AdamW.of(0.03, 0.1);
        AdamW other = AdamW.of(1, 0.9, 0.9, 1, 0, true);
        SGD sgd = SGD.of(0.5, 0)) {
      Tensor labels = Tensor.of(new long[] {0, 1, 1, 0}, 4);
      for (int i = 0; i < 3; ++i) {
        training.step(adam, points(), labels);
      }
      long whole = training.save(file, adam);
      same(whole, Path.of(file).toFile().length());
      require(training.save(file + ".delta", adam, file) < whole, "only the list");
      training.step(adam, points(), labels);
      float[] end = training.parameter("hidden.weight").floats();
      fails(BlobStoreException.Checkpoint.class, () -> again.restore(file, sgd), "AdamW, not of SGD");
      fails(BlobStoreException.Checkpoint.class, () -> again.restore(file + ".delta", other), "none is given");
      fails(BlobStoreException.FileAccess.class, () -> again.restore(folder + "no.checkpoint", other));
      fails(BlobStoreException.OutputPath.class, () -> training.save(folder + "programs/train.pte", null));
      fails(NullPointerException.class, () -> training.save(null, adam));
      again.restore(file + ".delta", other, file);
      again.step(other, points(), labels);
      require(Arrays.equals(end, again.parameter("hidden.weight").floats()), "the same bits");
      again.restore(file, null);
      print("adamw", end);
    }
    fails(BlobStoreException.Training.class, () -> AdamW.of(-1, 0));
  }

  /** The scores of a serving program come closer to the labels. tests/runtime/test_java.py makes the same steps. */
  private void mezo() {
    try (BlobCache cache = xor();
        Method serve = serve(cache);
        MeZO optimizer = MeZO.of(cache, 0.05, 1e-2, 7, "hidden.weight")) {
      same(optimizer.names(), List.of("hidden.weight"));
      DoubleSupplier loss =
          () -> {
            float[] scores = serve.execute(points()).tensor(0).floats();
            double sum = 0;
            for (int i = 0; i < scores.length; ++i) {
              sum += scores[i] * (double) scores[i] * (i + 1);
            }
            return sum;
          };
      double first = optimizer.step(loss);
      for (int i = 1; i < 10; ++i) {
        optimizer.step(loss);
      }
      same(optimizer.steps(), 10L);
      require(loss.getAsDouble() < first, "the loss falls");
      float[] before = cache.blob("hidden.weight").floats();
      print("mezo", before);
      IllegalStateException own = new IllegalStateException("no data");
      same(fails(IllegalStateException.class, () -> optimizer.step(() -> { throw own; }), "no data"), own);
      fails(BlobStoreException.NotFiniteLoss.class, () -> optimizer.step(() -> Double.NaN));
      require(Arrays.equals(before, cache.blob("hidden.weight").floats()), "as before the step");
      optimizer.setSteps(3);
      same(optimizer.steps(), 3L);
      fails(BlobStoreException.Training.class, () -> optimizer.setOptions(-1, 1e-2, 0));
      fails(NullPointerException.class, () -> optimizer.step(null));
      fails(BlobStoreException.KeyNotFound.class, () -> MeZO.of(cache, 0.1, 1e-2, 0, "hiden.weight"), "hiden.weight");
    }
  }

  private void names() {
    String cache = folder + "programs/xor.ptd";
    try (BlobCache xor = xor();
        Method serve = serve(xor);
        SGD sgd = SGD.of(0.1, 0)) {
      same(xor.toString(), "BlobCache(" + cache + ", " + xor.keys().size() + " keys, generation 0)");
      same(serve.toString(), "Method(forward: " + serve.inputs() + " to " + serve.outputs() + ")");
      same(sgd.toString(), "SGD()");
      same(serve.execute(points()).toString(), "Outputs[float32[4, 2]]");
      require(xor.stats().toString().startsWith("Stats("), "stats");
      require(xor.stats().toString().contains("dirtyKeys=0"), "stats");
    }
  }

  private void releases() throws IOException {
    String device = folder + "device";
    fails(BlobStoreException.Release.class, () -> Release.open(folder + "nowhere"));
    Release live = null;
    for (String version : List.of("1", "2")) {
      Path release = Path.of(folder, "published", "model", version);
      String index = release.resolve("index.json").toString();
      ReleaseOptions options = new ReleaseOptions().name("model").version(version);
      fails(BlobStoreException.Transfer.class, () -> Releases.commit(index, device, options));
      Missing todo = Releases.missing(index, device, options);
      same(todo.name, "model");
      require(!todo.current && todo.bytes > 0 && todo.releaseBytes > 0 && todo.folder.endsWith("/"), "missing");
      for (int round = 0; !todo.fetches.isEmpty(); ++round) {
        require(round < 2, "two rounds are enough");
        for (Missing.Fetch one : todo.fetches) {
          download(Path.of(folder, "published"), one, todo.folder);
        }
        todo = Releases.missing(index, device, options);
      }
      InstalledRelease installed = Releases.commit(index, device, options);
      same(installed.version, version);
      same(installed.sha256, todo.sha256);
      require(installed.changed, "changed");
      require(Releases.missing(index, device, options).current, "current");
      try (BlobCache cache = BlobCache.open(installed.path + "/model.ptd")) {
        print("release " + version, cache.blob("layer0.weight").floats()[5]);
      }
      live = live == null ? opened(device) : followed(live);
      fails(
          BlobStoreException.Trust.class,
          () -> Releases.missing(index, device, new ReleaseOptions().sha256("0".repeat(64))));
      fails(BlobStoreException.Trust.class, () -> Releases.missing(index, device, new ReleaseOptions().name("other")));
    }
    Release last = live;
    last.close();
    same(last.toString(), "Release(closed)");
    fails(BlobStoreException.Closed.class, last::follow);
    fails(BlobStoreException.Closed.class, last.cache()::generation);
    pulls();
    String first = folder + "published/model/1/index.json";
    fails(BlobStoreException.Trust.class, () -> Releases.missing(first, device, new ReleaseOptions()), "1");
    require(!Releases.missing(first, device, new ReleaseOptions().allowRollback(true).plain(true)).current, "a rollback");
    Releases.Collected removed = Releases.gc(device, 1);
    same(removed.releases, 1L);
    require(removed.files > 0 && removed.bytes > 0 && removed.inUse == 0, "what was removed");
    fails(BlobStoreException.Release.class, () -> Releases.gc(device, 0));
    fails(BlobStoreException.Release.class, () -> Releases.gc(device, -1));
    fails(BlobStoreException.Release.class, () -> Releases.gc(folder + "nowhere", 1));
  }

  private Release opened(String device) {
    Release live = Release.open(device);
    same(live.toString(), "Release(model 1 in " + live.path() + ")");
    for (InstalledFile file : live.files()) {
      print("file", file.name, file.kind, String.join(",", file.data));
    }
    fails(BlobStoreException.Release.class, () -> Release.open(device, List.of("no.ptd"), null, ""), "no.ptd");
    try (Release part = Release.open(device, List.of("xor.ptd"), null, "")) {
      require(!part.cache().contains("layer0.weight"), "only what was named");
    }
    Followed nothing = live.follow();
    require(nothing.taken && nothing.keys.isEmpty(), "it is the newest");
    return live;
  }

  private Release followed(Release live) {
    same(live.version(), "1");
    Followed done = live.follow(Release.FollowAdapters.RELEASE);
    require(done.taken && done.reasons.isEmpty(), done.toString());
    same(done.version, live.version());
    same(done.generation, live.cache().generation());
    print("followed", String.join(",", done.keys));
    print("followed weight", live.cache().blob("layer0.weight").floats()[5]);
    return live;
  }

  /** With a downloader, from an address that nobody has. */
  private void pulls() throws IOException {
    String root = "https://models.example.com/releases/";
    String latest = root + "model/latest/index.json";
    String device = folder + "pulled";
    List<String> urls = new ArrayList<>();
    Releases.Download download =
        (url, range, file) -> {
          urls.add(url);
          byte[] all = Files.readAllBytes(Path.of(folder, "published", url.substring(root.length())));
          Files.write(Path.of(file), part(all, range));
        };
    InstalledRelease done = Releases.pull(latest, device, download, new ReleaseOptions());
    same(done.version, "2");
    same(urls.get(0), latest);
    same(urls.get(1), root + "model/2/ways.json.zst");
    require(done.changed && Files.exists(Path.of(done.path, "model.ptd")), "it is installed");
    urls.clear();
    require(!Releases.pull(latest, device, download, new ReleaseOptions()).changed, "nothing is new");
    same(urls, List.of(latest));
    ReleaseOptions none = new ReleaseOptions();
    fails(BlobStoreException.Input.class, () -> Releases.pull("index.json", device, download, none), "not the URL of an index");
    fails(
        IOException.class,
        () ->
            Releases.pull(
                latest,
                device,
                (url, range, file) -> {
                  throw new IOException("offline");
                },
                none),
        "offline");
  }

  private static byte[] part(byte[] all, String range) {
    if (range.isEmpty()) {
      return all;
    }
    String[] ends = range.substring("bytes=".length()).split("-");
    return Arrays.copyOfRange(all, Integer.parseInt(ends[0]), Integer.parseInt(ends[1]) + 1);
  }

  private static void download(Path server, Missing.Fetch one, String into) throws IOException {
    byte[] all = part(Files.readAllBytes(server.resolve(one.url)), one.range);
    same((long) all.length, one.size);
    Files.write(Path.of(into, one.file), all);
  }

  private void closed() {
    BlobCache cache = xor();
    Program program = Program.load(folder + "programs/serve.pte", cache);
    Method method = program.loadMethod("forward");
    LogicalTensors tensors = LogicalTensors.of(cache);
    PackedStore store = PackedStore.open(folder + "packed");
    SGD sgd = SGD.of(0.5, 0);
    cache.close();
    program.close();
    print("scores of a closed program", method.execute(points()).tensor(0).floats());
    tensors.update(Map.of("hidden.weight", Tensor.zeros(DType.FLOAT32, 10, 2))); // it holds the cache
    print("zeroed in a closed cache", method.execute(points()).tensor(0).floats());
    for (NativeObject one : List.of(method, tensors, store, sgd)) {
      require(!one.closed(), "open");
      one.close();
    }
    Class<BlobStoreException.Closed> gone = BlobStoreException.Closed.class;
    for (NativeObject one : List.of(cache, program, method, tensors, store, sgd)) {
      require(one.closed(), "closed");
      one.close(); // again
      fails(gone, () -> one.get(pointer -> pointer), "this " + one.getClass().getSimpleName() + " was closed");
    }
    fails(gone, cache::keys);
    fails(gone, cache::revert);
    fails(gone, () -> program.loadMethod("forward"));
    fails(gone, () -> method.execute(points()));
    fails(gone, () -> tensors.value("hidden.bias"));
    fails(gone, () -> Adapters.setStrength(tensors, 1));
    fails(gone, store::stats);
    fails(gone, () -> Program.load(folder + "programs/serve.pte", cache));
    fails(gone, () -> BlobCache.open(List.of(), BlobCache.Mode.PRIVATE, null, store));
    fails(gone, () -> LogicalTensors.of(cache));
    Class<NullPointerException> none = NullPointerException.class;
    fails(none, () -> LogicalTensors.of(null));
    fails(none, () -> TrainingProgram.load(null, "forward"));
    fails(none, () -> Adapters.load(null, "a.ptd"));
    fails(none, () -> Adapters.setStrength(null, 1));
    fails(none, () -> Adapters.loadAll(null, List.of(), new double[] {}, OptionalDouble.empty()));
    fails(none, () -> Adapters.setStrengths(null, 1));
    fails(none, () -> Adapters.merge(null, "a.ptd", 1));
  }

  private static boolean isMapped(String file) throws IOException {
    return Files.readString(Path.of("/proc/self/maps")).contains(file);
  }

  /** What is closed, or collected without that, gives back its memory: the map of the file goes. */
  private void collected() throws IOException {
    String file = folder + "mapped.ptd";
    Files.copy(Path.of(folder, "plain.ptd"), Path.of(file));
    try (BlobCache cache = BlobCache.open(file)) {
      require(isMapped(file) && cache.contains("a"), "mapped");
    }
    require(!isMapped(file), "closed");
    for (int i = 0; i < 3; ++i) {
      require(BlobCache.open(file).contains("a"), "lost at once");
    }
    require(isMapped(file), "mapped");
    for (int i = 0; i < 1000 && isMapped(file); ++i) {
      System.gc();
      BlobCache.open().close(); // takes what was collected
    }
    require(!isMapped(file), "collected");
  }

  private void nothingIsLeft() {
    for (int i = 0; i < 1000 && Handle.open() != 0; ++i) {
      System.gc();
      BlobCache.open().close();
    }
    same(Handle.open(), 0);
  }
}
