"""The control plane: jobs, queues, events, the HTTP API, the supervisor and the command line."""
