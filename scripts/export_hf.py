"""The same as `jaxrl-lm export`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["export", *sys.argv[1:]])
