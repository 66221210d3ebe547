"""The process that owns the model on the prefill machine."""
