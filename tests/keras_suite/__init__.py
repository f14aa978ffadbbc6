"""Keras's own tests, run stock and then under keras_turbo, compared test by test."""
