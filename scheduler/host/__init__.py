"""What runs on this machine: directories, the Redis server, processes and their supervisor."""
