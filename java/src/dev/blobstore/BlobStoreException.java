package dev.blobstore;

import java.util.List;

/**
 * What every call of this package throws if it cannot be done. The message names the file or the key, what was expected
 * and what was found. Each kind of error of the C++ library is one nested class here, under the same name, so that a
 * handler can be written for a kind:
 *
 * <pre>{@code
 * try {
 *   Adapters.load(tensors, "german.ptd");
 * } catch (BlobStoreException.Adapter error) { // of another foundation, for example; nothing was changed
 *   log(error.getMessage());
 * }
 * }</pre>
 *
 * Besides these, {@link NullPointerException} means an argument that must not be null, {@link OutOfMemoryError} that
 * memory ran out, in Java or in the library.
 */
public class BlobStoreException extends RuntimeException {
  private static final long serialVersionUID = 1;

  private final String path;
  private final String reason;
  private final int number;

  private BlobStoreException(String path, String reason, int number) {
    super(path.isEmpty() ? reason : path + ": " + reason);
    this.path = path;
    this.reason = reason;
    this.number = number;
  }

  /** The file that the error is about; empty if it is about none. The message begins with it. */
  public String path() {
    return path;
  }

  /** The message without the path. */
  public String reason() {
    return reason;
  }

  /** The system's errno for FileAccess, ExecuTorch's error number for Program and Execution, otherwise 0. */
  public int number() {
    return number;
  }

  /** A file is not what it claims to be. */
  public static class InvalidFile extends BlobStoreException {
    InvalidFile(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** The structure of a file is sound, but its bytes are not what was written. */
  public static final class Integrity extends InvalidFile {
    Integrity(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** The operating system refused access, or the file was truncated. */
  public static final class FileAccess extends BlobStoreException {
    FileAccess(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** No blob or tensor has this name. */
  public static final class KeyNotFound extends BlobStoreException {
    KeyNotFound(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** One key was used for two different contents. */
  public static final class KeyConflict extends BlobStoreException {
    KeyConflict(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** A layout is impossible, does not fit its bytes, or is not the expected one. */
  public static final class Layout extends BlobStoreException {
    Layout(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** An object was used after {@code close()}. */
  public static final class Closed extends BlobStoreException {
    Closed(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** This cache, in this mode or at this moment, cannot do it. */
  public static final class Unsupported extends BlobStoreException {
    Unsupported(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** ExecuTorch cannot load a program or a method. */
  public static class Program extends BlobStoreException {
    Program(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** A program has no such method. */
  public static final class MethodNotFound extends BlobStoreException {
    MethodNotFound(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** The inputs of a call do not fit the method: their number, kind, dtype or shape. */
  public static final class Input extends BlobStoreException {
    Input(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** A method is delegated to a backend that this process does not have. */
  public static final class MissingBackend extends Program {
    MissingBackend(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** A method failed while it ran. */
  public static final class Execution extends Program {
    Execution(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** A buffer, array, dtype or value that this call does not take or give. */
  public static final class UnsupportedData extends BlobStoreException {
    UnsupportedData(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** An update by name that is refused, incomplete or not finite; nothing was changed. */
  public static final class Update extends BlobStoreException {
    Update(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** An adapter of another foundation, incomplete, or in conflict; nothing was changed. */
  public static final class Adapter extends BlobStoreException {
    Adapter(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** An output would replace an input or a protected file. */
  public static final class OutputPath extends BlobStoreException {
    OutputPath(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** Memory or a file changed while it was used. */
  public static final class DataChanged extends BlobStoreException {
    DataChanged(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** A training step is not possible. */
  public static class Training extends BlobStoreException {
    Training(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** The loss is infinite or NaN. */
  public static final class NotFiniteLoss extends Training {
    NotFiniteLoss(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** This key cannot be written to a file. */
  public static final class InvalidKey extends BlobStoreException {
    InvalidKey(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** This alignment cannot be written to a file, or not together with the others. */
  public static final class InvalidAlignment extends BlobStoreException {
    InvalidAlignment(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** A release does not fit the folder or the device. */
  public static class Release extends BlobStoreException {
    Release(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** A release is not the expected one, or older than what is installed. */
  public static final class Trust extends Release {
    Trust(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** Files of a release were not fetched yet. */
  public static final class Transfer extends BlobStoreException {
    Transfer(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  /** A checkpoint does not belong to this program, optimizer or base; nothing was changed. */
  public static final class Checkpoint extends BlobStoreException {
    Checkpoint(String path, String reason, int number) {
      super(path, reason, number);
    }
  }

  interface Maker {
    BlobStoreException make(String path, String reason, int number);
  }

  /** Of the kinds of the C++ library, {@code enum class ErrorKind} of blobstore/error.h, in its order. */
  static final List<Maker> MAKERS =
      List.of(
          InvalidFile::new,
          Integrity::new,
          FileAccess::new,
          KeyNotFound::new,
          KeyConflict::new,
          Layout::new,
          Closed::new,
          Unsupported::new,
          Program::new,
          MethodNotFound::new,
          Input::new,
          MissingBackend::new,
          Execution::new,
          UnsupportedData::new,
          Update::new,
          Adapter::new,
          OutputPath::new,
          DataChanged::new,
          Training::new,
          NotFiniteLoss::new,
          InvalidKey::new,
          InvalidAlignment::new,
          Release::new,
          Trust::new,
          Transfer::new,
          Checkpoint::new);

  /** The exception for an error of the library; native code calls this. */
  static BlobStoreException of(int kind, String path, String reason, int number) {
    return MAKERS.get(kind).make(path, reason, number);
  }
}
