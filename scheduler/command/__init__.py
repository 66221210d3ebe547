"""What a person types: the subcommands of `tandem` and the client they use."""
