"""Train text-embedding models: four published recipes as Lightning modules."""
