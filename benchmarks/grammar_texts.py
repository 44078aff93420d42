"""Grammars of many kinds, each with texts that are in it."""

# ruff: noqa: E501

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
}  # fmt: skip
