"""The state format: model cache lists as verified, bit-exact bytes."""
