"""From activations to an artifact: statistics, transforms, self-check.

Knows tensors only; `integrations.transformers.calibrate` feeds it a model. Imports `methods`,
`artifact`, `codec` and `recipe`.
"""
