"""The packaged recipes and their code. :mod:`stretto.config.recipes` loads them."""
