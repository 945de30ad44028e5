"""Runtimes: ``inline`` in this process, ``local`` in processes, ``sim`` in virtual time."""
