"""The same as `jaxrl-lm recipe`: see `--help` for its options."""

import sys

from jaxrl_lm.cli import main

main(["recipe", *sys.argv[1:]])
