"""The tensors of a model and the bytes that a program stores of them: records, steps, updates. All of it runs on the device, on numpy."""
