"""The same as `jaxrl-lm traces`: see `--help` for every option."""

import sys

from jaxrl_lm.cli import main

main(["traces", *sys.argv[1:]])
