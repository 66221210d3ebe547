"""The ledger: where every second and byte of a request went, and why it went that way."""
