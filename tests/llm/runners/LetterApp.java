import dev.blobstore.BlobCache;
import dev.blobstore.LetterRunner;
import dev.blobstore.Method;
import dev.blobstore.Program;
import java.io.IOException;
import java.io.InputStream;
import java.net.URI;
import java.net.URLConnection;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;

/** The application of examples/llm with a runner and a tokenizer of letters. */
final class LetterApp implements App.Platform {
  public static void main(String[] arguments) throws IOException {
    App.run(new LetterApp(), arguments);
  }

  private static final class Letters extends LetterRunner implements App.Model {
    private final Method forward;

    Letters(Method forward, int tokens) {
      super(forward, tokens);
      this.forward = forward;
    }

    @Override
    public void close() {
      forward.close();
    }
  }

  @Override
  public App.Model model(String files, BlobCache cache, int tokens) {
    try (Program program = Program.load(files + "model.pte", cache)) {
      return new Letters(program.loadMethod("forward"), tokens);
    }
  }

  @Override
  public long[] encode(String files, String text) {
    return LetterRunner.encode(text);
  }

  @Override
  public void fetch(String url, String range, String file) throws IOException {
    URLConnection connection = URI.create(url).toURL().openConnection();
    if (!range.isEmpty()) {
      connection.setRequestProperty("Range", range);
    }
    try (InputStream body = connection.getInputStream()) {
      Files.copy(body, Path.of(file), StandardCopyOption.REPLACE_EXISTING);
    }
  }
}
