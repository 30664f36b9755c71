"""The web console: pages for operators, and a playground for those who use models.

Rendered by the server, with small modules of our own in the browser; it works without internet.
`guard` decides who reaches what, `visitor` has the table of pages, `sign_in` and `session` the
login, `rendering` the templates and `live` what changes while a page is open. A page's actions are
requests to the gateway's own API. `model_form` and `model_edit_page` edit models in the
configuration file.
"""

from app.console.console import Console
from app.console.model_form import is_shown

__all__ = ("Console", "is_shown")
