"""What a cache type costs a model: divergence, retrieval and generation against the f16 cache of the same model."""
