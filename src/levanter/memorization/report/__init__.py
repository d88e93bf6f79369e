"""The report: one HTML file with everything in it, which asks for nothing else, now or in ten years."""

from levanter.memorization.report.page import report_html as report_html
