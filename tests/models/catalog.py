"""Every model of the zoo by its name."""

from tests.models.language import LANGUAGE
from tests.models.vision import VISION

CATALOG = {**LANGUAGE, **VISION}
