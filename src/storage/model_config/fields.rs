//! The fields of a `config.json`, read by name. An error names the field.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::dtype::Dtype;
use crate::error::LayersError;

pub(super) struct Fields(Map<String, Value>);

impl Fields {
    /// Reads an object, and in the configuration of a multimodal model the language model's.
    pub(super) fn parse(text: &str) -> Result<Self, LayersError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let json = |error: serde_json::Error| LayersError::Json(error.to_string().into());
        let mut fields: Map<String, Value> = serde_json::from_str(text).map_err(json)?;
        if let Some(Value::Object(language)) = fields.remove("text_config") {
            fields.extend(language);
        }
        Ok(Self(fields))
    }

    pub(super) fn get<T: DeserializeOwned>(&self, field: &'static str) -> Result<Option<T>, LayersError> {
        let value = self.0.get(field).unwrap_or(&Value::Null);
        Option::deserialize(value).map_err(|error| LayersError::field(field, error))
    }

    /// Returns the value of the first of several names that is present.
    pub(super) fn first<T: DeserializeOwned>(
        &self,
        names: &[&'static str],
    ) -> Result<Option<T>, LayersError> {
        let found = names.iter().find(|&&name| self.0.get(name).is_some_and(|value| !value.is_null()));
        found.map_or(Ok(None), |name| self.get(name))
    }

    pub(super) fn need<T: DeserializeOwned>(&self, names: &[&'static str]) -> Result<T, LayersError> {
        self.first(names)?.ok_or_else(|| missing(names[0]))
    }

    /// Returns an object within the configuration.
    pub(super) fn section(&self, field: &'static str) -> Result<Option<Self>, LayersError> {
        Ok(self.get(field)?.map(Self))
    }

    /// Returns the fields that are set, and not to what stands for nothing.
    pub(super) fn set(&self) -> impl Iterator<Item = (&str, &Value)> {
        let nothing = [Value::Null, json!(false), json!(0), json!([])];
        let fields = self.0.iter().map(|(field, value)| (field.as_str(), value));
        fields.filter(move |(_, value)| !nothing.contains(value))
    }

    pub(super) fn model_type(&self) -> Result<String, LayersError> {
        Ok(self.get("model_type")?.unwrap_or_default())
    }

    pub(super) fn layers(&self) -> Result<usize, LayersError> {
        self.get("num_hidden_layers")?.ok_or_else(|| {
            let nested = self.0.iter().find(|(_, value)| value.get("num_hidden_layers").is_some());
            let hint = nested
                .map_or(String::new(), |(field, _)| format!(", but {field} in it has: save that as a file"));
            LayersError::Missing { field: "num_hidden_layers", hint: hint.into() }
        })
    }

    /// Returns the type of the model's activations, and so of K and V.
    pub(super) fn dtype(&self) -> Result<Dtype, LayersError> {
        let name: Option<String> = self.first(&["torch_dtype", "dtype"])?;
        name.map_or(Ok(Dtype::Bf16), |name| {
            dtype(&name).ok_or_else(|| {
                LayersError::field("torch_dtype", format_args!("K and V of dtype {name:?} are not supported"))
            })
        })
    }
}

/// Returns the type of this name, if it is a floating-point type of states.
pub(super) fn dtype(name: &str) -> Option<Dtype> {
    Some(match name {
        "bfloat16" => Dtype::Bf16,
        "float16" => Dtype::F16,
        "float32" => Dtype::F32,
        _ => return None,
    })
}

pub(super) fn missing(field: &'static str) -> LayersError {
    LayersError::Missing { field, hint: "".into() }
}
