"""Settings every test shares."""

from hypothesis import settings

# No example is timed: machines that run the tests are shared, and a slow moment is not a wrong answer.
settings.register_profile("perfmodel", deadline=None)
settings.load_profile("perfmodel")
