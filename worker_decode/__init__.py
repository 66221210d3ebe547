"""The process that owns the model, the batch and the store on the decode machine."""
