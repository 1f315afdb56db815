"""The same as `jaxrl-lm prm`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["prm", *sys.argv[1:]])
