"""`python -m jaxrl_lm` is `jaxrl-lm`."""

from jaxrl_lm.cli import main

if __name__ == "__main__":
    main()
