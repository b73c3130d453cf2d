"""Where offloaded bytes live: scratch files on disk, with every transfer checked."""
