"""Training: whole steps as programs, and optimizer updates by torch's fused kernels.

`steps` lowers the forward pass, the loss and the metrics of one step together; `update`
applies gradients. Both serve the patched methods of Keras's trainer and optimizer, and
leave everything that is not exactly as assumed to stock Keras.
"""
