"""Train text-embedding models: four published recipes as Lightning modules."""

__version__ = "0.1.0"
