"""Grammars of many kinds, each with texts that are in it."""

# ruff: noqa: E501
import json
from collections.abc import Iterator

_WORDS = "The quick brown fox jumps over the lazy dog, and then it sleeps for ten hours."


def _counted_strings() -> Iterator[tuple[str, str, list[str]]]:
    """Patterns that count, with bounds on the length beside them and without."""
    for pattern, text in (
        (r"^(\S+\s+){0,19}\S+$", _WORDS),
        (r"^(?:\S+\s+){0,49}\S+$", _WORDS),
        (r"^(\w+\s?){1,30}$", _WORDS.replace(",", "").replace(".", "")),
        (r"^([^,]+,){0,99}[^,]+$", "red,green,dark blue," * 4 + "white"),
        (r"^(a|ab){0,50}$", "aababaab" * 2),
        (r"^((\w+ ){1,5}\n){0,20}$", "one two three \nfour five \n" * 3),
        (r"^([^\n]{0,80}\n){0,60}[^\n]{0,80}$", _WORDS[:70] + "\n" + _WORDS[:60]),
        (r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.){0,9}[a-z]{2,63}$", "docs.some-site.example.org"),
        (r"^(?!org\.)([a-z]+\.){0,9}[a-z]+$", "com.example.plugin.entry"),
    ):
        for bounds in ({}, {"maxLength": 200}, {"maxLength": 5000}, {"minLength": 10, "maxLength": 200}):
            schema = {"type": "string", "pattern": pattern, **bounds}
            yield (
                f"{pattern} {', '.join(f'{k} {v}' for k, v in bounds.items())}",
                json.dumps(schema),
                [json.dumps(text)],
            )
    fields = {
        f"f{n}": {"type": "string", "pattern": rf"^(\S+\s+){{0,{n}}}\S+$", "maxLength": 9 * n} for n in (19, 29, 49)
    }
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    yield "three fields", json.dumps(schema), [json.dumps(dict.fromkeys(fields, _WORDS))]
    yield "three alternatives", json.dumps({"anyOf": list(fields.values())}), [json.dumps(_WORDS)]


# name: (kind, grammar, texts)
GRAMMARS: dict[str, tuple[str, str, list[str]]] = {
    "json (lark)": (
        "lark",
        r"""
        start: value
        ?value: object | array | ESCAPED_STRING | SIGNED_NUMBER | "true" | "false" | "null"
        array: "[" [value ("," value)*] "]"
        object: "{" [pair ("," pair)*] "}"
        pair: ESCAPED_STRING ":" value
        %import common.ESCAPED_STRING
        %import common.SIGNED_NUMBER
        %import common.WS
        %ignore WS
        """,
        ['{"name": "Ada", "born": 1815, "works": ["notes", null, {"n": -1.5e3}]}', "[1, 2, 3, [4, [5, [6]]]]"],
    ),
    "arithmetic (ebnf)": (
        "ebnf",
        'root ::= expr\nexpr ::= term (("+" | "-" | "*" | "/") term)*\nterm ::= [0-9]+ ("." [0-9]+)? | "(" expr ")" | "-" term',
        ["12*(3+4)-5/(6-(7+8))", "-1.5+(2*(3*(4*5)))"],
    ),
    "sql (lark)": (
        "lark",
        r"""
        start: select ";"
        select: "SELECT"i columns "FROM"i table join* where? group? order? limit?
        columns: "*" | column ("," column)*
        column: expr ("AS"i NAME)?
        table: NAME ("AS"i? NAME)? | "(" select ")" "AS"i? NAME
        join: ("LEFT"i | "INNER"i)? "JOIN"i table "ON"i expr
        where: "WHERE"i expr
        group: "GROUP"i "BY"i expr ("," expr)*
        order: "ORDER"i "BY"i expr ("ASC"i | "DESC"i)? ("," expr ("ASC"i | "DESC"i)?)*
        limit: "LIMIT"i INT
        ?expr: expr ("AND"i | "OR"i) expr | expr ("=" | "<" | ">" | "<=" | ">=" | "<>") expr
             | expr ("+" | "-" | "*" | "/") expr | "NOT"i expr | expr "IN"i "(" expr ("," expr)* ")"
             | expr "IS"i "NOT"i? "NULL"i | NAME "(" ("*" | expr ("," expr)*)? ")" | "(" expr ")"
             | NAME ("." NAME)? | NUMBER | STRING
        NAME: /[a-z_][a-z0-9_]*/i
        STRING: /'([^'\n]|'')*'/
        %import common.INT
        %import common.NUMBER
        %import common.WS
        %ignore WS
        """,
        [
            "SELECT name, COUNT(*) AS n FROM users AS u LEFT JOIN orders AS o ON u.id = o.user_id WHERE u.age >= 18 "
            "AND o.total > 9.5 GROUP BY name ORDER BY n DESC LIMIT 10;",
            "SELECT * FROM (SELECT a, b FROM t WHERE c IN (1, 2, 3)) AS s WHERE s.a IS NOT NULL OR NOT s.b = 'it''s';",
        ],
    ),
    "c-like (lark)": (
        "lark",
        r"""
        start: function+
        function: type NAME "(" [type NAME ("," type NAME)*] ")" block
        type: ("int" | "float" | "char" | "void") "*"*
        block: "{" statement* "}"
        ?statement: type NAME ("=" expr)? ";" | expr ";" | "return" expr? ";" | block
                  | "if" "(" expr ")" statement ("else" statement)? | "while" "(" expr ")" statement
                  | "for" "(" expr? ";" expr? ";" expr? ")" statement
        ?expr: expr OPERATOR expr | ("-" | "!" | "*" | "&") expr | expr "(" [expr ("," expr)*] ")"
             | expr "[" expr "]" | "(" expr ")" | NAME | NUMBER | STRING
        OPERATOR: "+" | "-" | "*" | "/" | "%" | "==" | "!=" | "<" | ">" | "<=" | ">=" | "&&" | "||" | "="
        NAME: /[A-Za-z_][A-Za-z0-9_]*/
        NUMBER: /[0-9]+(\.[0-9]+)?/
        STRING: /"([^"\\\n]|\\.)*"/
        COMMENT: /\/\/[^\n]*/
        %import common.WS
        %ignore WS
        %ignore COMMENT
        """,
        [
            'int main(int argc, char **argv) {\n  int i = 0; // count\n  for (i = 0; i < 10; i = i + 1) {\n'
            '    if (i % 2 == 0) printf("%d\\n", a[i]);\n    else return -1;\n  }\n  return 0;\n}',
        ],
    ),
    "python-like (ebnf)": (
        "ebnf",
        r"""
        root ::= stmt+
        stmt ::= simple "\n" | "def " name "(" (name (", " name)*)? "):\n" body | "if " expr ":\n" body ("else:\n" body)?
        body ::= ("    " simple "\n")+
        simple ::= "return" (" " expr)? | name " = " expr | expr | "pass"
        expr ::= atom ((" + " | " - " | " * " | " == " | " < " | " and " | " or ") atom)*
        atom ::= name ("(" (expr (", " expr)*)? ")" | "[" expr "]" | "." name)* | [0-9]+ | string | "(" expr ")" | "[" (expr (", " expr)*)? "]"
        name ::= [a-zA-Z_] [a-zA-Z0-9_]*
        string ::= "\"" [^"\\\n]* "\""
        """,
        ['def area(width, height):\n    size = width * height\n    return size\nprint(area(3, 4) + len("abc"))\n'],
    ),
    "xml (ebnf)": (
        "ebnf",
        r"""
        root ::= "<?xml version=\"1.0\"?>\n"? element "\n"?
        element ::= "<" name attribute* ("/>" | ">" (text | element | comment)* "</" name ">")
        attribute ::= space name "=" "\"" ([^<&"] | entity)* "\""
        text ::= ([^<&] | entity)+
        entity ::= "&" ("lt" | "gt" | "amp" | "quot" | "#" [0-9]+) ";"
        comment ::= "<!--" ([^\x2d] | "-" [^\x2d])* "-->"
        name ::= [A-Za-z_] [A-Za-z0-9_.\x2d]*
        space ::= [ \t\n]+
        """,
        ['<note id="7"><to>Ada &amp; Bob</to><!-- kept short --><body lang="en">Come at five.</body><empty/></note>'],
    ),
    "lisp (lark)": (
        "lark",
        r"""
        start: form+
        ?form: "(" form* ")" | "'" form | SYMBOL | NUMBER | STRING
        SYMBOL: /[a-z+*\/<>=!?-][a-z0-9+*\/<>=!?-]*/
        NUMBER: /-?[0-9]+(\.[0-9]+)?/
        STRING: /"([^"\\\n]|\\.)*"/
        %import common.WS
        %ignore WS
        """,
        ['(define (fact n) (if (<= n 1) 1 (* n (fact (- n 1)))))\n(print "5! is" (fact 5) \'(a b c))'],
    ),
    "toml-like (ebnf)": (
        "ebnf",
        r"""
        root ::= (line? "\n")*
        line ::= "[" key ("." key)* "]" | key " = " value | "#" [^\n]*
        key ::= [A-Za-z0-9_\x2d]+
        value ::= string | number | "true" | "false" | "[" (value (", " value)*)? "]" | "{ " key " = " value (", " key " = " value)* " }"
        string ::= "\"" ([^"\\\n] | "\\" [nt"\\])* "\""
        number ::= [+\x2d]? ("0" | [1-9] [0-9]*) ("." [0-9]+)?
        """,
        ['# settings\n[server.http]\nhost = "127.0.0.1"\nport = 8080\nratios = [0.5, 1.25]\nlimits = { soft = 10, hard = 20 }\n\n'],
    ),
    "graphql (lark)": (
        "lark",
        r"""
        start: operation+
        operation: ("query" | "mutation")? NAME? variables? selection
        variables: "(" (VARIABLE ":" type ("=" value)?)+ ")"
        type: (NAME | "[" type "]") "!"?
        selection: "{" field+ "}"
        field: (NAME ":")? NAME arguments? directive* selection? | "..." NAME
        directive: "@" NAME arguments?
        arguments: "(" (NAME ":" value)+ ")"
        value: VARIABLE | NUMBER | STRING | "true" | "false" | "null" | NAME | "[" value* "]" | "{" (NAME ":" value)* "}"
        VARIABLE: /\$[A-Za-z_][A-Za-z0-9_]*/
        NAME: /[A-Za-z_][A-Za-z0-9_]*/
        NUMBER: /-?[0-9]+(\.[0-9]+)?/
        STRING: /"[^"\n]*"/
        %ignore /[ \t\n,]+/
        """,
        ['query Hero($id: ID!, $n: Int = 3) { hero(id: $id) { name friends(first: $n) @include(if: true) { name } } }'],
    ),
    "calls (ebnf)": (
        "ebnf",
        r"""
        root ::= call (";" " "? call)*
        call ::= ("get_weather" | "search" | "send_mail") "(" (argument (", " argument)*)? ")"
        argument ::= ("city" | "query" | "to" | "limit") "=" value
        value ::= "'" [^'\n]* "'" | [0-9]+ | "[" (value (", " value)*)? "]" | call
        """,
        ["get_weather(city='Oslo'); send_mail(to=['ada@example.com'], query=search(query='rain', limit=3))"],
    ),
    "regex: date": ("regex", r"(19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", ["1999-12-31", "2024-02-29"]),
    "regex: .{0,500}": ("regex", ".{0,500}", ["Any text of moderate length, up to five hundred characters."]),
    "regex: words": ("regex", r"([A-Z][a-z]+ ){2,5}[A-Z][a-z]+\.", ["The Quick Brown Fox.", "Ada Lovelace Wrote Notes."]),
    "regex: fifty words": ("regex", r"(?:\S+\s+){0,49}\S+", [_WORDS, "one"]),
    "regex: a hundred items": ("regex", r"([^,]+,){0,99}[^,]+", [", ".join(["red", "green", "dark blue"] * 12)]),
    "regex: ambiguous counts": ("regex", r"(\w+\s?){1,60}", [_WORDS.replace(",", "").replace(".", "")]),
    "regex: counts in counts": ("regex", r"((\w+ ){1,5}\n){0,20}", ["one two three \nfour five \n" * 6]),
    "regex: look-ahead": ("regex", r"(?!admin)(?=.*[0-9])[a-z0-9_]{4,30}", ["ada_1815", "user_number_7"]),
    "lines (ebnf)": (
        "ebnf",
        'root ::= line{1,40}\nline ::= item ("," item){0,19} "\\n"\nitem ::= [^,\\n]{1,30}',
        ["name,born,city\nAda Lovelace,1815,London\n" * 4],
    ),
    "nested five deep (ebnf)": (
        "ebnf",
        "root ::= a\n"
        + "".join(f'{x} ::= "(" ({y} ","?){{0,5}} ")" | [0-9]{{1,3}}\n' for x, y in zip("abcde", "bcdef", strict=True))
        + "f ::= [0-9]+",
        ["((1,2,(3,(4,5),6)),(7,8),9)"],
    ),
    "words of 500 (ebnf)": (
        "ebnf",
        'root ::= word (", " word){0,30}\nword ::= ' + " | ".join(f'"name{i * 7919 % 10_007}x"' for i in range(500)),
        [", ".join(f"name{i * 7919 % 10_007}x" for i in range(7, 500, 60))],
    ),
    "rows (lark)": (
        "lark",
        'start: row~1..100\nrow: CELL ("," CELL)~0..19 "\\n"\nCELL: /[^,\\n]{1,40}/',
        ["name,born,city\nAda Lovelace,1815,London\n" * 4],
    ),
    **{f"pattern: {name}": ("json_schema", schema, texts) for name, schema, texts in _counted_strings()},
}  # fmt: skip
