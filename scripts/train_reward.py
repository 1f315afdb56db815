"""The same as `jaxrl-lm reward`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["reward", *sys.argv[1:]])
