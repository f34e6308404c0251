package dev.blobstore;

/** The element types of tensors, in the order of ExecuTorch's numbers. */
public enum DType {
  UINT8(1),
  INT8(1),
  INT16(2),
  INT32(4),
  INT64(8),
  FLOAT16(2),
  FLOAT32(4),
  FLOAT64(8),
  COMPLEX32(4),
  COMPLEX64(8),
  COMPLEX128(16),
  BOOL(1),
  QINT8(1),
  QUINT8(1),
  QINT32(4),
  BFLOAT16(2),
  QUINT4X2(1),
  QUINT2X4(1),
  BITS1X8(1),
  BITS2X4(1),
  BITS4X2(1),
  BITS8(1),
  BITS16(2),
  FLOAT8_E5M2(1),
  FLOAT8_E4M3FN(1),
  FLOAT8_E5M2FNUZ(1),
  FLOAT8_E4M3FNUZ(1),
  UINT16(2),
  UINT32(4),
  UINT64(8);

  private static final DType[] ALL = values();

  private final int size;

  DType(int size) {
    this.size = size;
  }

  /** The bytes of one element. */
  public int size() {
    return size;
  }

  static DType of(int number) {
    return ALL[number];
  }
}
