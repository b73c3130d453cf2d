"""One file for each technique, each with its subclass of `planning.technique.Technique` as `TECHNIQUE`."""
