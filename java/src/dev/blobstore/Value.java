package dev.blobstore;

import java.lang.reflect.Field;
import java.lang.reflect.Modifier;
import java.util.StringJoiner;

/** What has public fields and no native object. */
abstract class Value {
  /** The name of the class, and its fields with what they have: for logs, so it may change. */
  @Override
  public String toString() {
    StringJoiner text = new StringJoiner(", ", getClass().getSimpleName() + "(", ")");
    for (Field field : getClass().getFields()) {
      if (!Modifier.isStatic(field.getModifiers())) {
        try {
          text.add(field.getName() + "=" + field.get(this));
        } catch (IllegalAccessException unreachable) {
          throw new AssertionError(unreachable);
        }
      }
    }
    return text.toString();
  }
}
