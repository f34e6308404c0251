package dev.blobstore;

import java.util.LinkedHashMap;
import java.util.Map;

/** Tensors by name, as native code takes them: a copy, so that no other thread changes it meanwhile. */
final class Named {
  // native code reads these
  final String[] names;
  final Tensor[] tensors;

  Named(Map<String, Tensor> values) {
    Map<String, Tensor> copy = new LinkedHashMap<>(values);
    names = copy.keySet().toArray(new String[0]);
    tensors = copy.values().toArray(new Tensor[0]);
  }
}
