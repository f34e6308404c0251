import dev.blobstore.AdamW;
import dev.blobstore.Adapters;
import dev.blobstore.BlobCache;
import dev.blobstore.InstalledRelease;
import dev.blobstore.LogicalTensors;
import dev.blobstore.Program;
import dev.blobstore.ReleaseOptions;
import dev.blobstore.Releases;
import dev.blobstore.Request;
import dev.blobstore.Runners;
import dev.blobstore.Tensor;
import dev.blobstore.TextRunner;
import dev.blobstore.TrainingProgram;
import java.io.File;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.OptionalDouble;
import java.util.Scanner;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Collectors;

/**
 * An application with one language model, two adapters of PEFT, training and releases, as app.py is in Python, which says
 * what the commands on standard input are. {@code DEVICE URL NAME=FOLDER...}: the folder of the device, the index of the
 * newest release, and the adapters. One that was trained here is kept in DEVICE, and is there when the application starts
 * again, however it ended.
 */
public final class App {
  /** A runner, such as one around ExecuTorch's LlmModule. */
  public interface Model extends TextRunner, AutoCloseable {
    @Override
    void close();
  }

  /** What is yours: the runners, the tokenizer, and the downloader. */
  public interface Platform extends Releases.Download {
    /** A runner of the model in the folder of a release, for answers of so many tokens. */
    Model model(String files, BlobCache cache, int tokens);

    /** The tokens of a text, by the tokenizer in the folder of a release. */
    long[] encode(String files, String text);
  }

  private static final int USERS = 2;
  private static final int STEPS = 20;
  private static final int TOKENS = 12;
  private static final double SCALE = 2; // what the branches of the program multiply with: lora_alpha / r

  private final Platform platform;
  private final String device;
  private final String url;
  private final Map<String, String> adapters;
  private String files; // of the current release
  private final List<Model> models = new ArrayList<>();
  private Runners runners;

  private App(Platform platform, String device, String url, Map<String, String> adapters) throws IOException {
    this.platform = platform;
    this.device = device;
    this.url = url;
    this.adapters = adapters;
    if (!new File(device, "current").exists()) {
      Releases.pull(url, device, platform, new ReleaseOptions());
    }
    open();
  }

  private void open() throws IOException {
    files = new File(device, "current").getCanonicalPath() + "/"; // where `current` leads to, also when that changes
    List<BlobCache> layers = new ArrayList<>();
    try (BlobCache foundation = BlobCache.open(files + "foundation.ptd")) {
      for (int user = 0; user < USERS; ++user) {
        layers.add(layer(foundation, "model_lora.ptd"));
        models.add(platform.model(files, layers.get(user), TOKENS));
      }
    }
    runners = Runners.of(models, layers, OptionalDouble.empty());
    layers.forEach(BlobCache::close);
    adapters.replaceAll((name, path) -> new File(trained(name)).exists() ? trained(name) : path);
    adapters.forEach(runners::setAdapter);
  }

  private BlobCache layer(String foundation, String adapter) {
    try (BlobCache base = BlobCache.open(files + foundation)) {
      return layer(base, adapter);
    }
  }

  private BlobCache layer(BlobCache base, String adapter) {
    return BlobCache.open(List.of(files + adapter), BlobCache.Mode.PRIVATE, base, null);
  }

  private String trained(String name) {
    return device + "/" + name + ".trained.ptd";
  }

  private String ask(String requests) {
    List<CompletableFuture<String>> answers = new ArrayList<>();
    for (String request : requests.split(" \\| ")) {
      String[] words = request.split(" ", 2);
      Request with = new Request().adapter(words[0]);
      answers.add(CompletableFuture.supplyAsync(() -> runners.generate(words[1], with)));
    }
    return answers.stream().map(CompletableFuture::join).collect(Collectors.joining(" | "));
  }

  private String train(String name, String text) {
    long[] ids = platform.encode(files, text);
    int length = ids.length - 1;
    Tensor tokens = Tensor.of(Arrays.copyOf(ids, length), 1, length);
    Tensor following = Tensor.of(Arrays.copyOfRange(ids, 1, ids.length), 1, length);
    Map<String, Tensor> adapter = new HashMap<>();
    float loss = 0;
    try (BlobCache served = layer("foundation.ptd", "model_lora.ptd");
        LogicalTensors start = LogicalTensors.of(served);
        BlobCache cache = layer("train_foundation.ptd", "train_adapter.ptd");
        Program program = Program.load(files + "train.pte", cache);
        TrainingProgram training = TrainingProgram.load(program, "forward");
        AdamW optimizer = AdamW.of(0.01, 0.01)) {
      Adapters.load(start, adapters.get(name)); // the training goes on from it
      training.names().forEach(tensor -> training.setParameter(tensor, start.value(tensor)));
      for (int step = 0; step < STEPS; ++step) {
        loss = training.step(optimizer, tokens, following).tensor(0).floats()[0];
      }
      training.names().forEach(tensor -> adapter.put(tensor, training.parameter(tensor)));
    }
    Adapters.save(trained(name), adapter, List.of(files + "foundation.ptd"), SCALE);
    runners.setAdapter(name, trained(name));
    adapters.put(name, trained(name));
    return name + " " + loss;
  }

  private String update() throws IOException {
    InstalledRelease release = Releases.pull(url, device, platform, new ReleaseOptions());
    runners.close();
    models.forEach(Model::close);
    models.clear();
    open();
    return release.version;
  }

  private String obey(String line) throws IOException {
    String[] words = line.split(" ", 3);
    return words[0].equals("train")
        ? train(words[1], words[2])
        : words[0].equals("ask") ? ask(line.substring(4)) : update();
  }

  /** Obey standard input. */
  public static void run(Platform platform, String... arguments) throws IOException {
    Map<String, String> adapters = new HashMap<>();
    for (String argument : Arrays.asList(arguments).subList(2, arguments.length)) {
      adapters.put(argument.split("=", 2)[0], argument.split("=", 2)[1]);
    }
    App app = new App(platform, arguments[0], arguments[1], adapters);
    for (Scanner lines = new Scanner(System.in); lines.hasNextLine(); ) {
      System.out.println(app.obey(lines.nextLine()));
    }
  }
}
