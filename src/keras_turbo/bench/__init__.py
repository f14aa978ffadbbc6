"""`keras-turbo bench`: stock Keras, turbo and hand-written torch, measured side by side.

`workloads` names what is measured and `models` builds it in Keras; `reference` holds the
same models as plain torch code. `case` builds one workload three times with equal weights,
`measure` times them in turns, `report` prints. `cli` is the command.
"""
