"""Runs the command line for `python -m memwall`, and `torchrun ... -m memwall run`."""

import sys

from memwall.cli.app import main

sys.exit(main())
