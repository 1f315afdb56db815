"""The same as `jaxrl-lm eval`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["eval", *sys.argv[1:]])
