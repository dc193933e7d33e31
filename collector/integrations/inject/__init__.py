"""The folder that ``lanterne run`` puts on PYTHONPATH: it holds nothing but a ``sitecustomize``."""
