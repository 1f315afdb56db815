"""The same as `jaxrl-lm plan`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["plan", *sys.argv[1:]])
