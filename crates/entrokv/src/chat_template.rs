//! To come: chat_template.
