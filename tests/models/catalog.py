"""Every model of the zoo by its name."""

from tests.models.further import FURTHER
from tests.models.language import LANGUAGE, MORE_TEXT
from tests.models.libraries import LIBRARIES
from tests.models.signals import SIGNALS
from tests.models.vision import VISION

CATALOG = {**LANGUAGE, **MORE_TEXT, **VISION, **FURTHER, **LIBRARIES, **SIGNALS}
