"""Training scripts that tests run as a user would, in a process of their own; none of them is a test or a doctest."""

collect_ignore_glob = ["*.py"]
