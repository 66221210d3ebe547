"""The LMDB store of conversations and, in store.codec, the one format of cache state."""
