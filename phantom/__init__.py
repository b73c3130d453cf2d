"""A CUDA device that nobody has to own: torch's own CUDA build over stub libraries. README.md says how it is used."""
