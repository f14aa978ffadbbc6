"""Train, evaluate and serve a small convolutional network on scikit-learn's digits.

An ordinary Keras script: nothing in it knows of keras_turbo. Run it as it is, or with
`python -m keras_turbo examples/digits.py`. The last line is for programs to read.
"""

import os
import time

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

EPOCHS = 20
REQUESTS = 4000


def load_data():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    return train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)


def build_model():
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
    x = keras.layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Flatten()(x)
    for _ in range(4):
        x = keras.layers.Dense(64, activation="relu")(x)
    x = keras.layers.Dropout(0.3)(x)
    outputs = keras.layers.Dense(10, activation="softmax")(x)
    model = keras.Model(inputs, outputs)
    schedule = keras.optimizers.schedules.CosineDecay(2e-3, decay_steps=45 * EPOCHS)
    model.compile(
        optimizer=keras.optimizers.Adam(schedule),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def serve(model, images):
    """Answer one request at a time, as a small web service would."""
    answers = []
    for i in range(REQUESTS):
        image = images[i % len(images)]
        answers.append(keras.ops.convert_to_numpy(model(image[None], training=False)).argmax())
    return np.array(answers)


def main():
    keras.utils.set_random_seed(0)
    x_train, x_test, y_train, y_test = load_data()
    model = build_model()

    start = time.perf_counter()
    model.fit(x_train, y_train, batch_size=32, epochs=EPOCHS, verbose=2)
    trained = time.perf_counter()
    _, accuracy = model.evaluate(x_test, y_test, verbose=0)
    predicted = model.predict(x_test, batch_size=8, verbose=0).argmax(axis=1)
    evaluated = time.perf_counter()
    served = serve(model, x_test)
    end = time.perf_counter()

    agree = np.array_equal(served[: len(predicted)], predicted)
    print(f"{REQUESTS} single requests answered, the same answers as predict: {agree}")
    print(
        f"accuracy={accuracy:.4f} train={trained - start:.2f}s "
        f"evaluate={evaluated - trained:.2f}s serve={end - evaluated:.2f}s "
        f"total={end - start:.2f}s"
    )


if __name__ == "__main__":
    main()
