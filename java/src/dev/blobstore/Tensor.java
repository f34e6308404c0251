package dev.blobstore;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.Locale;

/**
 * A tensor over a direct {@link ByteBuffer}. Its memory belongs to Java: it is valid for as long as the tensor, its
 * buffer or a view of that is reachable, and needs no {@code close()}. No native object refers to it after a call.
 *
 * <p>The shape never changes, the numbers may: {@link #data} is the memory itself. Access from several threads is not
 * synchronized; a call that reads numbers while another thread writes them sees some of each.
 */
public final class Tensor {
  /** The most dimensions that ExecuTorch runs. */
  static final int MAX_RANK = 16;

  final ByteBuffer data; // direct, in native order, from position 0 to the limit, which is its capacity
  final int type;
  final int[] sizes;
  final int[] order; // the dimensions from outermost to innermost in memory; null if row-major

  private Tensor(ByteBuffer data, int type, int[] sizes, int[] order) {
    this.data = data;
    this.type = type;
    this.sizes = sizes;
    this.order = order;
  }

  /**
   * A tensor over the bytes between the position and the limit of a direct buffer, in row-major order. Nothing is
   * copied: the tensor and the buffer share the memory.
   *
   * @param buffer direct, in the byte order of the machine: {@code
   *     ByteBuffer.allocateDirect(n).order(ByteOrder.nativeOrder())}.
   * @throws BlobStoreException.UnsupportedData the buffer is not direct, or its numbers have the other byte order.
   * @throws BlobStoreException.Layout the buffer has another number of bytes than the tensor, or the sizes are
   *     impossible.
   */
  public static Tensor of(ByteBuffer buffer, DType dtype, long... sizes) {
    return of(buffer, dtype, sizes, null);
  }

  /**
   * As above, for another order of dimensions in memory.
   *
   * @param order the dimensions from outermost to innermost: {0, 2, 3, 1} is channels-last. Null is row-major.
   */
  public static Tensor of(ByteBuffer buffer, DType dtype, long[] sizes, int[] order) {
    if (!buffer.isDirect()) {
      throw new BlobStoreException.UnsupportedData("", "the buffer is not direct; use ByteBuffer.allocateDirect", 0);
    }
    if (dtype.size() > 1 && buffer.order() != ByteOrder.nativeOrder()) {
      throw new BlobStoreException.UnsupportedData(
          "", "the buffer is in " + buffer.order() + "; call order(ByteOrder.nativeOrder()) before it is filled", 0);
    }
    int[] checked = checkedSizes(sizes);
    long nbytes = nbytes(dtype, checked);
    if (nbytes != buffer.remaining()) {
      throw new BlobStoreException.Layout(
          "", describe(dtype, checked) + " has " + nbytes + " bytes, the buffer has " + buffer.remaining(), 0);
    }
    return new Tensor(
        buffer.slice().order(ByteOrder.nativeOrder()), dtype.ordinal(), checked, checkedOrder(order, checked.length));
  }

  /** A copy of an array as FLOAT32. @throws BlobStoreException.Layout the array has another number of elements. */
  public static Tensor of(float[] values, long... sizes) {
    Tensor made = ofLength(values.length, DType.FLOAT32, sizes);
    made.data.asFloatBuffer().put(values);
    return made;
  }

  /** A copy of an array as FLOAT64. @throws BlobStoreException.Layout the array has another number of elements. */
  public static Tensor of(double[] values, long... sizes) {
    Tensor made = ofLength(values.length, DType.FLOAT64, sizes);
    made.data.asDoubleBuffer().put(values);
    return made;
  }

  /** A copy of an array as INT32. @throws BlobStoreException.Layout the array has another number of elements. */
  public static Tensor of(int[] values, long... sizes) {
    Tensor made = ofLength(values.length, DType.INT32, sizes);
    made.data.asIntBuffer().put(values);
    return made;
  }

  /** A copy of an array as INT64. @throws BlobStoreException.Layout the array has another number of elements. */
  public static Tensor of(long[] values, long... sizes) {
    Tensor made = ofLength(values.length, DType.INT64, sizes);
    made.data.asLongBuffer().put(values);
    return made;
  }

  /** A copy of an array as UINT8. @throws BlobStoreException.Layout the array has another number of elements. */
  public static Tensor of(byte[] values, long... sizes) {
    Tensor made = ofLength(values.length, DType.UINT8, sizes);
    made.data.duplicate().put(values);
    return made;
  }

  /** A copy of an array as BOOL. @throws BlobStoreException.Layout the array has another number of elements. */
  public static Tensor of(boolean[] values, long... sizes) {
    Tensor made = ofLength(values.length, DType.BOOL, sizes);
    for (int i = 0; i < values.length; ++i) {
      made.data.put(i, (byte) (values[i] ? 1 : 0));
    }
    return made;
  }

  /** A tensor of zeros. @throws BlobStoreException.Layout the sizes are impossible. */
  public static Tensor zeros(DType dtype, long... sizes) {
    int[] checked = checkedSizes(sizes);
    return allocate(dtype.ordinal(), checked, null);
  }

  /** The type of its elements. */
  public DType dtype() {
    return DType.of(type);
  }

  /** Its sizes; a new array. */
  public long[] sizes() {
    return Arrays.stream(sizes).asLongStream().toArray();
  }

  /** The dimensions from outermost to innermost in memory; a new array. {0, 1, 2, …} is row-major. */
  public int[] dimOrder() {
    if (order != null) {
      return order.clone();
    }
    int[] made = new int[sizes.length];
    Arrays.setAll(made, i -> i);
    return made;
  }

  /** The number of its elements. */
  public int elements() {
    return data.capacity() / dtype().size();
  }

  /** Its memory, in the byte order of the machine; a new buffer over the same bytes, with a position of its own. */
  public ByteBuffer data() {
    ByteBuffer view = data.duplicate();
    view.clear();
    return view.order(ByteOrder.nativeOrder());
  }

  /** A copy of FLOAT32 numbers, as they lie in memory. @throws BlobStoreException.UnsupportedData of another dtype. */
  public float[] floats() {
    require(DType.FLOAT32, "floats");
    float[] made = new float[elements()];
    data.asFloatBuffer().get(made);
    return made;
  }

  /** A copy of FLOAT64 numbers, as they lie in memory. @throws BlobStoreException.UnsupportedData of another dtype. */
  public double[] doubles() {
    require(DType.FLOAT64, "doubles");
    double[] made = new double[elements()];
    data.asDoubleBuffer().get(made);
    return made;
  }

  /** A copy of INT32 numbers, as they lie in memory. @throws BlobStoreException.UnsupportedData of another dtype. */
  public int[] ints() {
    require(DType.INT32, "ints");
    int[] made = new int[elements()];
    data.asIntBuffer().get(made);
    return made;
  }

  /** A copy of INT64 numbers, as they lie in memory. @throws BlobStoreException.UnsupportedData of another dtype. */
  public long[] longs() {
    require(DType.INT64, "longs");
    long[] made = new long[elements()];
    data.asLongBuffer().get(made);
    return made;
  }

  /** A copy of its bytes, of any dtype. */
  public byte[] bytes() {
    byte[] made = new byte[data.capacity()];
    data().get(made);
    return made;
  }

  /** For messages: {@code float32[2, 3]}. */
  @Override
  public String toString() {
    return describe(dtype(), sizes);
  }

  /** A tensor in new memory, of zeros; native code calls this for its results. */
  static Tensor allocate(int type, int[] sizes, int[] order) {
    DType dtype = DType.of(type);
    ByteBuffer data = ByteBuffer.allocateDirect(checkedLength(dtype, sizes)).order(ByteOrder.nativeOrder());
    return new Tensor(data, type, sizes, order);
  }

  static String describe(DType dtype, int[] sizes) {
    return dtype.name().toLowerCase(Locale.ROOT) + Arrays.toString(sizes);
  }

  private static Tensor ofLength(int length, DType dtype, long[] sizes) {
    int[] checked = checkedSizes(sizes);
    long wanted = nbytes(dtype, checked) / dtype.size();
    if (wanted != length) {
      throw new BlobStoreException.Layout(
          "", describe(dtype, checked) + " has " + wanted + " elements, the array has " + length, 0);
    }
    return allocate(dtype.ordinal(), checked, null);
  }

  private static int checkedLength(DType dtype, int[] sizes) {
    long nbytes = nbytes(dtype, sizes);
    if (nbytes > Integer.MAX_VALUE) {
      throw new BlobStoreException.UnsupportedData(
          "", describe(dtype, sizes) + " has " + nbytes + " bytes, more than a ByteBuffer holds", 0);
    }
    return (int) nbytes;
  }

  private static long nbytes(DType dtype, int[] sizes) {
    long total = dtype.size();
    try {
      for (int size : sizes) {
        total = Math.multiplyExact(total, (long) Math.max(size, 1));
      }
    } catch (ArithmeticException error) {
      throw new BlobStoreException.Layout("", describe(dtype, sizes) + " is too large", 0);
    }
    return Arrays.stream(sizes).anyMatch(size -> size == 0) ? 0 : total;
  }

  private static int[] checkedSizes(long[] sizes) {
    if (sizes.length > MAX_RANK) {
      throw new BlobStoreException.UnsupportedData(
          "", "a tensor has at most " + MAX_RANK + " dimensions, not " + sizes.length, 0);
    }
    int[] made = new int[sizes.length];
    for (int i = 0; i < made.length; ++i) {
      if (sizes[i] < 0 || sizes[i] > Integer.MAX_VALUE) {
        throw new BlobStoreException.Layout("", "a size must be from 0 to 2147483647, not " + sizes[i], 0);
      }
      made[i] = (int) sizes[i];
    }
    return made;
  }

  private static int[] checkedOrder(int[] order, int rank) {
    if (order == null) {
      return null;
    }
    int[] sorted = order.clone();
    Arrays.sort(sorted);
    boolean fits = sorted.length == rank;
    for (int i = 0; fits && i < rank; ++i) {
      fits = sorted[i] == i;
    }
    if (!fits) {
      throw new BlobStoreException.Layout(
          "", Arrays.toString(order) + " is no order of " + rank + " dimensions", 0);
    }
    return Arrays.equals(order, sorted) ? null : order.clone();
  }

  private void require(DType wanted, String call) {
    if (type != wanted.ordinal()) {
      throw new BlobStoreException.UnsupportedData("", call + "() is for " + wanted + "; this is " + this, 0);
    }
  }
}
