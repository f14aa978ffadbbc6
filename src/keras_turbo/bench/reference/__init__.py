"""The hand-written torch models: what a good user would write, at torch's defaults.

One file per family. Each model has a `copy_from` that takes the weights of the Keras model
it mirrors, so that the benchmark can prove that both compute the same function.
"""
