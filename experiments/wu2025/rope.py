"""What RoPE adds to the causal mask, one angle at a time (Wu et al. 2025, Lemma 4.6 and Theorem 4.7).

Heads have two coordinates: the score of query i and key j is b cos(phi - (i - j) theta), where b is the
product of both lengths, scaled as scores are, and phi the angle between the two before the rotation. The paper
counts layers t from 0, ``layers`` counts them from 1.
"""

from __future__ import annotations

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def scores(n: int, theta: float, b: ArrayLike, phi: ArrayLike = 0.0) -> Array:
    """Scores of every query and key under RoPE of one angle.

    Args:
        n: Tokens.
        theta: Rotation per token, in radians.
        b: Product of the lengths of query and key, a number or [n, n].
        phi: Angle between query and key before the rotation, in radians, a number or [n, n].

    Returns:
        Scores before the softmax, [n, n].
    """
    distance = np.subtract.outer(np.arange(n), np.arange(n))
    return np.asarray(b) * np.cos(np.asarray(phi) - distance * theta)


def bounds(
    n: int, theta: float, low: float, high: float, delta: float = 0.0
) -> tuple[Array, Array]:
    """Bound one layer's causal attention (Lemma 4.6).

    The bounds have the form C e^(-c (i - j)^2 theta^2), with c = ``high`` / 2 below and 2 ``low`` / pi^2 above:
    from 0 to pi, 1 - cos(x) lies between 2 x^2 / pi^2 and x^2 / 2. C differs by row, as the softmax does.

    Args:
        n: Tokens.
        theta: Rotation per token, in radians.
        low: Smallest b, 0 or more.
        high: Largest b.
        delta: Largest size of phi, as a multiple of theta.

    Returns:
        Lower and upper bounds of the weights, both [n, n], 0 above the diagonal.

    Raises:
        ValueError: (delta + n - 1) theta is above pi, where the cosine rises again and the lemma is silent.
    """
    if (delta + n - 1) * theta > np.pi:
        raise ValueError(
            f"(delta + n - 1) theta = {(delta + n - 1) * theta:.3g} is above pi"
        )
    distance = np.subtract.outer(np.arange(n), np.arange(n)).astype(np.float64)
    causal = distance >= 0
    steep = high / 2 * theta**2
    flat = 2 * low / np.pi**2 * theta**2
    # Exponentials of the scores lie between these two, and so do their sums over a row.
    smallest = np.exp(low - steep * (distance + delta) ** 2)
    largest = np.exp(high - flat * np.maximum(distance - delta, 0) ** 2)
    smallest_sum = np.where(causal, smallest, 0).sum(1, keepdims=True)
    largest_sum = np.where(causal, largest, 0).sum(1, keepdims=True)
    lower_c = np.exp(low - steep * (2 * (n - 1) * delta + delta**2)) / largest_sum
    upper_c = np.exp(high + flat * 2 * (n - 1) * delta) / smallest_sum
    lower = lower_c * np.exp(-steep * distance**2)
    upper = upper_c * np.exp(-flat * distance**2)
    return np.where(causal, lower, 0), np.where(causal, np.minimum(upper, 1), 0)


def law(layers: int, width: float, distance: ArrayLike) -> Array:
    """Logarithm of Theorem 4.7's closed form, binom(t + x, x) e^(-c x^2 theta^2), at distances x in tokens.

    The theorem's Theta hides that c may be down to a (t + 1)-th of one layer's: t + 1 factors share the
    distance.

    Args:
        layers: Layers, t + 1.
        width: Standard deviation of one layer's attention in tokens: c theta^2 = 1 / (2 width^2).
        distance: Distances x, any shape.

    Returns:
        Unnormalised log weights, of the same shape.
    """
    x = np.asarray(distance, dtype=np.float64)
    t = layers - 1
    return (
        scipy.special.gammaln(t + x + 1)
        - scipy.special.gammaln(x + 1)
        - scipy.special.gammaln(t + 1)
        - x**2 / (2 * width**2)
    )


def peak(layers: int, width: float) -> int:
    """Distance of the largest value of :func:`law`, in tokens.

    It grows with the width, and as sqrt(t) width where t is well below width^2; beyond that more slowly.
    """
    # The slope is below t / x - x / width^2, so the peak lies before sqrt(t) width.
    last = int(np.sqrt(layers) * width) + 1
    return int(law(layers, width, np.arange(last + 1)).argmax())


def stationary(layers: int, width: float, printed: float | None = None) -> float:
    """Distance at which Stirling's slope L'(x) = log((t + x) / x) - 2 c theta^2 x of :func:`law` is 0.

    Differs from source: Appendix H prints 2 c theta x, which is used with the angle theta as ``printed``.

    Args:
        layers: Layers, 2 or more.
        width: Standard deviation of one layer's attention in tokens.
        printed: The angle theta in radians, for the zero of the printed slope.

    Returns:
        The zero in tokens.
    """
    t = layers - 1
    slope = 1 / width**2 / (printed or 1.0)
    zero = scipy.optimize.brentq(
        lambda x: np.log1p(t / x) - slope * x, 1e-9, np.sqrt(t / slope) + 1
    )
    return float(zero)


def drift(layers: int, width: float) -> float:
    """Mean distance in tokens after some layers, if each goes back by the mean of half a Gaussian."""
    return layers * width * np.sqrt(2 / np.pi)
