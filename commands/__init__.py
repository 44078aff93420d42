"""What the everyday commands of the command line do: chat, generate, run, ps, completion and the config file."""
