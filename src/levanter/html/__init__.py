"""The kit of every HTML page: palette, escaping, tables, charts, number formats, and the document around them.

A page is one self-contained file that loads nothing. It is built in one of two ways: in Python from `tag` and its
relatives, which escape everything that is not `Html`, or in the browser by a script from JSON data (`result_page`),
which is set as text. Colors are variables of `palette.css`; a page's own style sheet names them and defines none.
"""

from levanter.html.markup import Html as Html
from levanter.html.markup import bullet_list as bullet_list
from levanter.html.markup import escaped as escaped
from levanter.html.markup import section as section
from levanter.html.markup import table as table
from levanter.html.markup import tag as tag
from levanter.html.markup import tiles as tiles
from levanter.html.page import document as document
from levanter.html.page import result_page as result_page
from levanter.html.page import script_json as script_json
from levanter.html.page import style_sheet as style_sheet
