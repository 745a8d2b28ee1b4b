//! Reads the text form, by recursive descent.

use std::collections::BTreeMap;
use std::str::FromStr;

use indexmap::IndexMap;

use crate::dtype::DType;
use crate::entity::{Arena, Entity};
use crate::error::GraphError;
use crate::graph::{
    Arg, Buffer, BufferId, ConstId, Constant, Dim, Graph, Op, OpId, Param, ParamId, SCHEMA, Source, Value, ValueDef,
    ValueId,
};
use crate::problem::MAX_LIST_DEPTH;
use crate::text::is_bare_char;

impl Graph {
    /// Reads the text form and verifies the graph. Blank lines do not count.
    ///
    /// # Errors
    /// With line and column when the text is no graph, with the places when the graph is not valid.
    pub fn from_text(text: &str) -> Result<Self, GraphError> {
        let mut parser = Parser { text, at: 0, values: BTreeMap::new() };
        let graph = parser.graph()?;
        graph.verify()?;
        Ok(graph)
    }
}

type Parsed<T> = Result<T, GraphError>;

struct Parser<'t> {
    text: &'t str,
    /// Bytes read.
    at: usize,
    values: BTreeMap<ValueId, Value>,
}

impl<'t> Parser<'t> {
    fn graph(&mut self) -> Parsed<Graph> {
        self.skip_blank_lines();
        let mut graph = self.header()?;
        loop {
            self.skip_blank_lines();
            let start = self.at;
            match self.bare() {
                "input" => self.input(&mut graph)?,
                "param" => self.param(&mut graph)?,
                "buffer" => self.buffer(&mut graph)?,
                "const" => self.constant(&mut graph)?,
                "outputs" => {
                    graph.outputs = self.value_list()?;
                    break;
                }
                word if word.starts_with("op") => {
                    self.at = start;
                    self.op(&mut graph)?;
                }
                _ => {
                    self.at = start;
                    return Err(self.error("expected input, param, buffer, const, an op such as op3, or outputs"));
                }
            }
            self.end_of_line()?;
        }
        self.skip_blank_lines();
        if self.at < self.text.len() {
            return Err(self.error("nothing may follow the outputs"));
        }
        graph.values = self.all_values()?;
        Ok(graph)
    }

    fn header(&mut self) -> Parsed<Graph> {
        self.keyword("graph")?;
        let name = self.string()?;
        self.keyword("schema")?;
        let schema: u64 = self.number("a schema version")?;
        if schema != u64::from(SCHEMA) {
            return Err(GraphError::Schema { found: schema });
        }
        let training = self.flag("training");
        if !training {
            self.keyword("evaluation")?;
        }
        self.keyword("rows")?;
        let sample_rows = self.number("a number of rows")?;
        self.end_of_line()?;
        Ok(Graph {
            schema: SCHEMA,
            name,
            training,
            sample_rows,
            mixing: crate::row_state::Mixing::default(),
            values: Arena::default(),
            ops: Arena::default(),
            params: Arena::default(),
            buffers: Arena::default(),
            constants: Arena::default(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        })
    }

    fn input(&mut self, graph: &mut Graph) -> Parsed<()> {
        let index = u32::try_from(graph.inputs.len()).map_err(|_| self.error("too many inputs"))?;
        graph.inputs.push(self.declaration(ValueDef::Input(index))?);
        Ok(())
    }

    fn param(&mut self, graph: &mut Graph) -> Parsed<()> {
        let id: ParamId = self.next_id("p", graph.params.len())?;
        let (name, aliases) = self.names()?;
        let value = self.declaration(ValueDef::Param(id))?;
        graph.params.push(Param { name, aliases, value });
        Ok(())
    }

    fn buffer(&mut self, graph: &mut Graph) -> Parsed<()> {
        let id: BufferId = self.next_id("b", graph.buffers.len())?;
        let (name, aliases) = self.names()?;
        let value = self.declaration(ValueDef::Buffer(id))?;
        let update = if self.flag("update") { Some(self.value()?) } else { None };
        graph.buffers.push(Buffer { name, aliases, value, update });
        Ok(())
    }

    fn constant(&mut self, graph: &mut Graph) -> Parsed<()> {
        let id: ConstId = self.next_id("c", graph.constants.len())?;
        let name = self.string()?;
        self.token("=")?;
        let value = self.declaration(ValueDef::Constant(id))?;
        self.keyword("data")?;
        let data = self.string()?;
        graph.constants.push(Constant { name, value, data });
        Ok(())
    }

    fn op(&mut self, graph: &mut Graph) -> Parsed<()> {
        let id: OpId = self.next_id("op", graph.ops.len())?;
        let mut results = Vec::new();
        if !self.eat("=") {
            loop {
                let place = u32::try_from(results.len()).map_err(|_| self.error("too many results"))?;
                results.push(self.declaration(ValueDef::Op { op: id, result: place })?);
                if !self.eat(",") {
                    break;
                }
            }
            self.token("=")?;
        }
        let target = self.bare_or_string("a target such as aten.add.Tensor")?;
        self.token("(")?;
        let (args, kwargs) = self.arguments()?;
        let mutates = if self.flag("mutates") { self.value_list()? } else { Vec::new() };
        let grad_enabled = !self.flag("no_grad");
        let (random, opaque, row_wise) = (self.flag("random"), self.flag("opaque"), self.flag("row_wise"));
        let region = if self.flag("region") { Some(self.number("a region number")?) } else { None };
        let row_group = if self.flag("row_group") { Some(self.number("a row group's number")?) } else { None };
        let module = if self.eat("@") { self.bare_or_string("a module path")? } else { String::new() };
        let source = if self.sees("\"") { Some(self.source()?) } else { None };
        graph.ops.push(Op {
            target,
            args,
            kwargs,
            results,
            mutates,
            grad_enabled,
            random,
            opaque,
            row_wise,
            region,
            row_group,
            module,
            source,
        });
        Ok(())
    }

    fn source(&mut self) -> Parsed<Source> {
        let file = self.string()?;
        self.token(":")?;
        Ok(Source { file, line: self.number("a line number")? })
    }

    /// A Value where it is defined, up to its name.
    fn declaration(&mut self, mut def: ValueDef) -> Parsed<ValueId> {
        self.skip_spaces();
        let start = self.at;
        let id = self.value()?;
        if let ValueDef::Op { result, .. } = &mut def
            && self.eat("#")
        {
            *result = self.number("a place in the returned tuple")?;
        }
        self.token(":")?;
        let dtype = self.dtype()?;
        let shape = self.shape()?;
        let requires_grad = self.flag("grad");
        let alias_of = if self.flag("alias") { Some(self.value()?) } else { None };
        let name = self.string()?;
        if self.values.insert(id, Value { name, dtype, shape, def, requires_grad, alias_of }).is_some() {
            self.at = start;
            return Err(self.error(&format!("{id} is defined twice")));
        }
        Ok(id)
    }

    fn dtype(&mut self) -> Parsed<DType> {
        self.skip_spaces();
        let start = self.at;
        DType::from_name(self.bare()).ok_or_else(|| {
            self.at = start;
            self.error("expected a type such as f32")
        })
    }

    fn all_values(&mut self) -> Parsed<Arena<ValueId, Value>> {
        let values = std::mem::take(&mut self.values);
        match (0..).map(ValueId).zip(values.keys()).find(|(expected, found)| expected != *found) {
            Some((missing, _)) => Err(self.error(&format!("{missing} is not defined"))),
            None => Ok(values.into_values().collect()),
        }
    }

    fn shape(&mut self) -> Parsed<Vec<Dim>> {
        self.token("[")?;
        self.sequence("]", Self::dim)
    }

    fn dim(&mut self) -> Parsed<Dim> {
        let head = self.signed_digits();
        if !self.rest().starts_with('b') {
            return Ok(Dim::fixed(self.parsed(head, "an extent such as 8 or 2b+1")?));
        }
        self.at += 1;
        let per_row = match head {
            "" => 1,
            "-" => -1,
            digits => self.parsed(digits, "a factor of the batch size")?,
        };
        let fixed = match self.rest().chars().next() {
            Some('+' | '-') => {
                let digits = self.signed_digits();
                self.parsed(digits, "the fixed part of an extent")?
            }
            _ => 0,
        };
        Ok(Dim { per_row, fixed })
    }

    fn arguments(&mut self) -> Parsed<(Vec<Arg>, IndexMap<String, Arg>)> {
        let (mut args, mut kwargs) = (Vec::new(), IndexMap::new());
        if self.eat(")") {
            return Ok((args, kwargs));
        }
        loop {
            self.skip_spaces();
            let start = self.at;
            match self.argument_name()? {
                Some(name) if kwargs.contains_key(&name) => {
                    self.at = start;
                    return Err(self.error(&format!("the argument {name} stands twice")));
                }
                Some(name) => {
                    kwargs.insert(name, self.arg(0)?);
                }
                None if kwargs.is_empty() => args.push(self.arg(0)?),
                None => return Err(self.error("expected a named argument")),
            }
            if self.eat(")") {
                return Ok((args, kwargs));
            }
            self.token(",")?;
        }
    }

    /// The name before `=`, if there is one; else reads nothing.
    fn argument_name(&mut self) -> Parsed<Option<String>> {
        let start = self.at;
        let name = if self.sees("\"") { self.string()? } else { self.bare().to_owned() };
        if !name.is_empty() && self.eat("=") {
            return Ok(Some(name));
        }
        self.at = start;
        Ok(None)
    }

    fn arg(&mut self, depth: usize) -> Parsed<Arg> {
        if self.sees("\"") {
            return Ok(Arg::Str(self.string()?));
        }
        if self.eat("<") {
            let dim = self.dim()?;
            self.token(">")?;
            return Ok(Arg::Dim(dim));
        }
        if self.eat("[") {
            if depth == MAX_LIST_DEPTH {
                return Err(self.error("lists nest too deep"));
            }
            return Ok(Arg::List(self.sequence("]", |parser| parser.arg(depth + 1))?));
        }
        let start = self.at;
        match self.bare() {
            "none" => Ok(Arg::None),
            "true" => Ok(Arg::Bool(true)),
            "false" => Ok(Arg::Bool(false)),
            "torch" => Ok(Arg::Torch(self.string()?)),
            word if word.starts_with("torch.") => Ok(Arg::Torch(word.to_owned())),
            word if word.starts_with('v') => {
                self.at = start;
                Ok(Arg::Value(self.value()?))
            }
            _ => {
                self.at = start;
                self.scalar()
            }
        }
    }

    fn scalar(&mut self) -> Parsed<Arg> {
        self.skip_spaces();
        let start = self.at;
        let text = self.take_while(|c| is_bare_char(c) || c == '-' || c == '+');
        let is_integer = text.strip_prefix('-').unwrap_or(text).bytes().all(|byte| byte.is_ascii_digit());
        if text.parse::<f64>().is_ok() && !is_integer {
            return Ok(Arg::Float(text.to_owned()));
        }
        text.parse().map(Arg::Int).map_err(|_| {
            self.at = start;
            self.error("expected an argument")
        })
    }

    fn sequence<T>(&mut self, end: &str, item: impl Fn(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut items = Vec::new();
        if self.eat(end) {
            return Ok(items);
        }
        loop {
            self.skip_spaces();
            items.push(item(self)?);
            if self.eat(end) {
                return Ok(items);
            }
            self.token(",")?;
        }
    }

    fn value_list(&mut self) -> Parsed<Vec<ValueId>> {
        let mut values = Vec::new();
        if self.sees("v") {
            values.push(self.value()?);
            while self.eat(",") {
                values.push(self.value()?);
            }
        }
        Ok(values)
    }

    fn value(&mut self) -> Parsed<ValueId> {
        self.numbered("v").map(ValueId)
    }

    /// An id that must be the next one of its kind.
    fn next_id<K: Entity>(&mut self, prefix: &str, expected: usize) -> Parsed<K> {
        self.skip_spaces();
        let start = self.at;
        let number = self.numbered(prefix)?;
        if number as usize != expected {
            self.at = start;
            return Err(self.error(&format!("expected {prefix}{expected}, ids count up")));
        }
        Ok(K::new(expected))
    }

    fn numbered(&mut self, prefix: &str) -> Parsed<u32> {
        self.skip_spaces();
        let start = self.at;
        let number = self.bare().strip_prefix(prefix).and_then(|digits| digits.parse().ok());
        number.ok_or_else(|| {
            self.at = start;
            self.error(&format!("expected an id such as {prefix}3"))
        })
    }

    /// One or more names, then `=`.
    fn names(&mut self) -> Parsed<(String, Vec<String>)> {
        let name = self.string()?;
        let mut aliases = Vec::new();
        while !self.eat("=") {
            aliases.push(self.string()?);
        }
        Ok((name, aliases))
    }

    fn string(&mut self) -> Parsed<String> {
        self.skip_spaces();
        let rest = self.rest();
        let mut escaped = false;
        let end = rest.char_indices().skip(1).find(|&(_, c)| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends || c == '\n'
        });
        let literal = end.and_then(|(end, _)| rest.get(..=end)).unwrap_or_default();
        match serde_json::from_str(literal) {
            Ok(text) => {
                self.at += literal.len();
                Ok(text)
            }
            Err(_) => Err(self.error("expected a string in double quotes")),
        }
    }

    fn bare_or_string(&mut self, what: &str) -> Parsed<String> {
        if self.sees("\"") {
            return self.string();
        }
        match self.bare() {
            "" => Err(self.error(&format!("expected {what}"))),
            word => Ok(word.to_owned()),
        }
    }

    fn number<T: FromStr>(&mut self, what: &str) -> Parsed<T> {
        self.skip_spaces();
        let digits = self.take_while(|c| c.is_ascii_digit());
        self.parsed(digits, what)
    }

    fn parsed<T: FromStr>(&mut self, digits: &str, what: &str) -> Parsed<T> {
        digits.parse().map_err(|_| {
            self.at -= digits.len();
            self.error(&format!("expected {what}"))
        })
    }

    fn signed_digits(&mut self) -> &'t str {
        let start = self.at;
        if self.rest().starts_with(['+', '-']) {
            self.at += 1;
        }
        self.take_while(|c| c.is_ascii_digit());
        &self.text[start..self.at]
    }

    fn keyword(&mut self, word: &str) -> Parsed<()> {
        if self.flag(word) { Ok(()) } else { Err(self.error(&format!("expected {word}"))) }
    }

    /// Reads `word` if it is the next one.
    fn flag(&mut self, word: &str) -> bool {
        let start = self.at;
        let found = self.bare() == word;
        if !found {
            self.at = start;
        }
        found
    }

    fn bare(&mut self) -> &'t str {
        self.skip_spaces();
        self.take_while(is_bare_char)
    }

    fn token(&mut self, token: &str) -> Parsed<()> {
        if self.eat(token) { Ok(()) } else { Err(self.error(&format!("expected {token}"))) }
    }

    fn eat(&mut self, token: &str) -> bool {
        let found = self.sees(token);
        if found {
            self.at += token.len();
        }
        found
    }

    fn sees(&mut self, token: &str) -> bool {
        self.skip_spaces();
        self.rest().starts_with(token)
    }

    fn end_of_line(&mut self) -> Parsed<()> {
        self.skip_spaces();
        let ends = self.rest().is_empty() || self.rest().starts_with(['\n', '\r']);
        if ends { Ok(()) } else { Err(self.error("expected the end of the line")) }
    }

    fn skip_spaces(&mut self) {
        self.take_while(|c| c == ' ' || c == '\t');
    }

    fn skip_blank_lines(&mut self) {
        self.take_while(char::is_whitespace);
    }

    fn take_while(&mut self, wanted: impl Fn(char) -> bool) -> &'t str {
        let rest = self.rest();
        let taken = &rest[..rest.find(|c| !wanted(c)).unwrap_or(rest.len())];
        self.at += taken.len();
        taken
    }

    fn rest(&self) -> &'t str {
        &self.text[self.at..]
    }

    fn error(&self, what: &str) -> GraphError {
        let (mut line, mut column) = (1, 1);
        for c in self.text[..self.at].chars() {
            (line, column) = if c == '\n' { (line + 1, 1) } else { (line, column + 1) };
        }
        GraphError::Text { line, column, what: what.to_owned() }
    }
}
