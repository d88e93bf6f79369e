"""Reports of preflight: `render` for a terminal, `to_json` for programs, `to_html` for a browser.

All three are functions of the verdicts alone and have the same content; `view` and `timing` derive it from a verdict.
No time in them is measured, and every form says so.
"""

from levanter.plan.report.before_you_pay import choice_text as choice_text
from levanter.plan.report.before_you_pay import choice_values as choice_values
from levanter.plan.report.comparison import compared_text as compared_text
from levanter.plan.report.comparison import compared_values as compared_values
from levanter.plan.report.html import to_html as to_html
from levanter.plan.report.text import render as render
from levanter.plan.report.to_json import to_json as to_json

__all__ = ["choice_text", "choice_values", "compared_text", "compared_values", "render", "to_html", "to_json"]
