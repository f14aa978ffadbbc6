"""Public `keras.layers` classes without a lowering rule, each with the reason.

These run stock Keras: alone as they are, inside a lowered model as stock nodes. A test
requires every public class to have either a rule or a line here, so that a new Keras layer
cannot go unnoticed.
"""

from __future__ import annotations

_FAMILIES = {
    "abstract: it has no computation of its own": "Layer Wrapper InputSpec Pipeline",
    "no rule yet: attention beside MultiHeadAttention": (
        "Attention AdditiveAttention GroupQueryAttention"
    ),
    "no rule yet: transposed convolutions": (
        "Conv1DTranspose Conv2DTranspose Conv3DTranspose Convolution1DTranspose "
        "Convolution2DTranspose Convolution3DTranspose"
    ),
    "no rule yet: adaptive pooling": (
        "AdaptiveAveragePooling1D AdaptiveAveragePooling2D AdaptiveAveragePooling3D "
        "AdaptiveMaxPooling1D AdaptiveMaxPooling2D AdaptiveMaxPooling3D"
    ),
    "no rule yet: it switches between two directions by an argument": "ReversibleEmbedding",
    "no rule yet: it writes its weights in each training call": "SpectralNormalization",
    "no rule yet: its noise is drawn in several steps": "AlphaDropout",
    "it calls a function of the user's own, which runs as it is": "Lambda",
    "it calls code of another framework, which runs as it is": (
        "TorchModuleWrapper JaxLayer FlaxLayer TFSMLayer"
    ),
    "no rule yet: preprocessing by lookup, hashing or strings": (
        "CategoryEncoding Discretization Hashing HashedCrossing IntegerLookup StringLookup "
        "TextVectorization"
    ),
    "no rule yet: preprocessing of numbers and signals": (
        "Normalization MelSpectrogram STFTSpectrogram"
    ),
    "no rule yet: image preprocessing, mostly random and outside the model": (
        "AugMix AutoContrast CenterCrop ContrastLimitedAdaptiveHistogramEqualization CutMix "
        "Equalization MaxNumBoundingBoxes MixUp RandAugment RandomBrightness "
        "RandomColorDegeneration RandomColorJitter RandomContrast RandomCrop "
        "RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale "
        "RandomHue RandomInvert RandomPerspective RandomPosterization RandomRotation "
        "RandomSaturation RandomSharpness RandomShear RandomTranslation RandomZoom Resizing "
        "Solarization"
    ),
}

DECLINED: dict[str, str] = {
    name: reason for reason, names in _FAMILIES.items() for name in names.split()
}
"""From the name of a class in `keras.layers` to why it has no rule."""
